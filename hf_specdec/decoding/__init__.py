"""The shared half of speculative decoding: target, tree, cache, acceptance and the loop. It knows no method by name."""
