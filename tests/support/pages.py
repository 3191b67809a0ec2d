"""Every page that a command can write, by name, for tests of what all of them must do."""

from collections.abc import Callable
from pathlib import Path

from counterpoint.records.diagnosis import TimelineLane
from counterpoint.rendering.diagnosis_html import write_html
from counterpoint.rendering.measurement_html import write_overlap_plot
from counterpoint.rendering.plan_html import write_plan_page
from counterpoint.rendering.tuning_tables import write_tuning_page
from tests.support import example_diagnosis, example_measurement, example_prediction, example_tuned

NO_SPANS = [TimelineLane(rank=0, name="host", start_us=(), duration_us=(), labels=())]
PAGES: dict[str, Callable[[Path], None]] = {
    "measurement": lambda path: write_overlap_plot(path, example_measurement.usual()),
    "blocks": lambda path: write_overlap_plot(path, example_measurement.blocks()),
    "hostile measurement": lambda path: write_overlap_plot(path, example_measurement.hostile()),
    "tuning": lambda path: write_tuning_page(path, example_tuned.example_tuned()),
    "hostile tuning": lambda path: write_tuning_page(path, example_tuned.hostile_tuned()),
    "prediction": lambda path: write_plan_page(path, example_prediction.usual()),
    "bare prediction": lambda path: write_plan_page(path, example_prediction.bare()),
    "hostile prediction": lambda path: write_plan_page(path, example_prediction.hostile()),
    "diagnosis": lambda path: write_html(path, example_diagnosis.training(), example_diagnosis.lanes()),
    "empty diagnosis": lambda path: write_html(path, example_diagnosis.empty(), []),
    "diagnosis without spans": lambda path: write_html(path, example_diagnosis.empty(), NO_SPANS),
    "hostile diagnosis": lambda path: write_html(path, *example_diagnosis.hostile()),
}
