"""`docs/alerts.yml`, loaded by Prometheus's own tool, and what its rules say of a run."""

import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

RULES = Path(__file__).parents[2] / "docs" / "alerts.yml"

# A minute for each value. Learner "l" publishes until minute 10; actor "a" follows far behind, then
# not at all.
RUN = """
rule_files: [RULES]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'up{job="workers", instance="l"}', values: '1x20 0x20'}
      - {series: 'aiorpc_workers{instance="a", state="lost"}', values: '0x20 1x20'}
      - {series: 'aiorpc_workers{instance="a", state="alive"}', values: '2x40'}
      - {series: 'aiorpc_coordinator{instance="a"}', values: '0x40'}
      - {series: 'aiorpc_coordinator{instance="l"}', values: '1x20 stale'}
      - {series: 'aiorpc_weights_version{instance="l", name="net"}', values: '0+50x10 500x30'}
      - {series: 'aiorpc_follower_version{instance="a", name="net"}', values: '0+20x10 200x30'}
      - {series: 'aiorpc_follower_age_seconds{instance="a", name="net"}', values: '1x10 60+60x30'}
      - {series: 'aiorpc_replay_inserted_total{instance="r", name="buffer"}', values: '0+9x40'}
      - {series: 'aiorpc_replay_sampled_total{instance="r", name="buffer"}', values: '0+9x10 90x30'}
    alert_rule_test:
"""
CASES = {  # alert: minutes at which it fires, and its labels
    "ProcessIsAway": ((25,), "job: workers, instance: l"),
    "WorkersAreLost": ((25,), ""),
    "NobodyKeepsTheDirectory": ((25,), ""),
    "NoNewVersion": ((27,), "name: net"),
    "FollowerIsFarBehind": ((19, 30), "instance: a, name: net"),
    "FollowerIsStale": ((30,), "instance: a, name: net"),
    "ReplayStandsStill": ((30,), "name: buffer"),
}


@pytest.fixture
def promtool() -> str:
    if (found := shutil.which("promtool")) is None:
        pytest.skip("no promtool here: tests/cluster/install gets it")
    return found


@pytest.mark.promise("watching.alerts")
def test_prometheus_loads_the_rules(promtool: str) -> None:
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "SUCCESS: 11 rules found" in done.stdout


@pytest.mark.promise("watching.alerts")
def test_what_fires(promtool: str, tmp_path: Path) -> None:
    """Nothing at the start, each alert once it has its reason."""
    text = RUN.replace("RULES", str(RULES))
    for alert, (minutes, labels) in CASES.items():
        for minute in (2, *minutes):
            expected = f"[{{exp_labels: {{{labels}}}}}]" if minute in minutes else "[]"
            case = f"- {{eval_time: {minute}m, alertname: {alert}, exp_alerts: {expected}}}\n"
            text += textwrap.indent(case, " " * 6)
    (file := tmp_path / "run.yml").write_text(text)
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
