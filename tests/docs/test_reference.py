"""The generated pages are those that the code would generate now (`make docs`)."""

from __future__ import annotations

from tools import reference


def test_config_page_is_up_to_date() -> None:
    assert (reference.PAGES / "config.md").read_text() == reference.config_page()


def test_page_of_topic_settings_is_up_to_date() -> None:
    assert (reference.PAGES / "topics.md").read_text() == reference.topics_page()


def test_command_line_page_is_up_to_date() -> None:
    assert (reference.PAGES / "cli.md").read_text() == reference.cli_page()


def test_data_source_page_is_up_to_date() -> None:
    assert (reference.PAGES / "pipeline.md").read_text() == reference.pipeline_page()


def test_metrics_page_is_up_to_date() -> None:
    assert (reference.PAGES / "metrics.md").read_text() == reference.metrics_page()


def test_every_decision_is_listed() -> None:
    assert (reference.DECISIONS / "index.md").read_text() == reference.decisions_page()
