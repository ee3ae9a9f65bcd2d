"""How a checkpoint comes to exist, whole or not at all, and what is left of those that did not."""
