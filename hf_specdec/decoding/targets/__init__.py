"""What the layers of a model store while it verifies trees: one class for each kind of layer."""
