"""What the layers of a model store while trees are verified on it: an object of its own for each kind of layer."""
