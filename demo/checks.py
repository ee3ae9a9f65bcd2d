"""Say what was checked, and stop at the first thing that is not so."""


class Failure(Exception):
    """The demonstration found something that must not be."""


def check(condition: bool, text: str) -> None:
    """Print ``text`` as a fact, or raise when it is none."""
    if not condition:
        raise Failure(f"not so: {text}")
    print(f"  ok  {text}", flush=True)
