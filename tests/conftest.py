"""Settings that hold for all tests: how hypothesis searches."""

import os

from hypothesis import HealthCheck, settings

# Deadlines measure the machine, not the code. In CI the same examples run every time.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
