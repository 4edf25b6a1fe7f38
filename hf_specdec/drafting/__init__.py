"""What methods share: the drafter and its options, the registry, growth of trees, the reader of committed features."""
