"""Settings: defaults, the environment, and what makes no sense."""

import pytest

from fpformat.errors import PlanError
from fpformat_io.config import EngineConfig, from_env

MIB = 1024 * 1024


def test_the_defaults_and_what_the_environment_changes():
    assert from_env({}) == EngineConfig()
    changed = from_env(
        {
            "FPFORMAT_STAGING_MIB": "32",
            "FPFORMAT_BUFFER_MIB": "8",
            "FPFORMAT_WORKERS": "3",
            "FPFORMAT_MODE": "buffered",
        }
    )
    assert changed == EngineConfig(
        staging_nbytes=32 * MIB, buffer_nbytes=8 * MIB, worker_count=3, mode="buffered"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FPFORMAT_STAGING_MIB", "much"),
        ("FPFORMAT_STAGING_MIB", "4"),
        ("FPFORMAT_BUFFER_MIB", "3"),
        ("FPFORMAT_BUFFER_MIB", "0"),
        ("FPFORMAT_WORKERS", "0"),
        ("FPFORMAT_WORKERS", "1.5"),
        ("FPFORMAT_MODE", "fast"),
    ],
)
def test_what_makes_no_sense_is_refused(name, value):
    with pytest.raises(PlanError, match=name if value in ("much", "1.5") else "expected"):
        from_env({name: value})
