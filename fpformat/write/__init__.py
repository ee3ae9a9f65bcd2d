"""From a plan to segments: their indexes, and the simplest correct writer."""
