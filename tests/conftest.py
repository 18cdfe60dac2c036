"""Fixtures and the hypothesis profile of the suite."""

import pytest
from cases import CASES, LAYOUTS, golden
from hypothesis import HealthCheck, settings

from k2i_jax.implementations import IMPLEMENTATIONS, device_platform

# Examples are few and the same in every run: a compiled shape is reused, and a failure can be repeated.
settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=20, suppress_health_check=list(HealthCheck)
)
settings.load_profile("suite")


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def implementation(request):
    """Keyword arguments that select each implementation on this host, interpreted where it cannot compile."""
    found = IMPLEMENTATIONS[request.param]
    reason = found.why_not(device_platform())
    if reason and not found.interprets:
        pytest.skip(f"{request.param}: {reason}")
    return {"implementation": request.param, "interpret": reason is not None}


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request):
    """The two layouts that can be written."""
    return request.param


@pytest.fixture(params=CASES)
def case(request):
    """Each golden case."""
    return golden(request.param)
