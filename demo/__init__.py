"""The main job from end to end on a real model: see ``demo/__main__.py``."""
