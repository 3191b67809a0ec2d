"""The fits of a machine on rows measured on 4 x H200: they predict times about as well as the shipped figures do."""

from msgspec.structs import replace
from tune_machine import errors, suite, without_exchanges

from counterpoint.machine.profile import default_profile
from counterpoint.tuning.machine import fit_profile

APART = 1.4  # percentage points: what `waves` missed on another run of the same pairs, 4.2 instead of 2.8 %


def test_fitted_figures_predict_as_well() -> None:
    """Of rows that were fitted and of others, no error is above that of shipped figures by more than runs differ."""
    shipped, measured = default_profile(), suite()
    rates = fit_profile(without_exchanges(measured), known=shipped).rates
    fitted = replace(fit_profile(measured, known=shipped), rates=rates)
    lines = list(errors(shipped, fitted, measured))
    worse = [line for line in lines if float(line[-1].rstrip("%")) > float(line[-2].rstrip("%")) + APART]
    assert (len(lines), worse) == (16, [])
