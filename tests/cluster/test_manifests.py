"""The manifests of the documentation, as Kubernetes reads them."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import guides

PODS = guides.DOCS / "guides" / "slurm-and-containers.md"
PAGES = sorted(
    path for path in guides.DOCS.rglob("*.md") if re.search("^ *kind:", path.read_text(), re.M)
)
OLDEST = "1.25"

Manifest = dict[str, Any]


class Job(NamedTuple):
    """What a test takes from the manifest of a job."""

    name: str
    size: int
    service: str
    command: list[str]
    variables: dict[str, str]
    cpus: str


def manifests(path: Path) -> list[Manifest]:
    """Return each resource of a page."""
    yaml = pytest.importorskip("yaml")
    blocks = [text for _, kind, text in guides.BLOCK.findall(path.read_text()) if kind == "yaml"]
    return [found for text in blocks for found in yaml.safe_load_all(text) if "kind" in found]


def job_of(found: list[Manifest]) -> Job:
    """Return the job of a page."""
    (job,) = [each for each in found if each["kind"] == "Job"]
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    return Job(
        name=job["metadata"]["name"],
        size=spec["completions"],
        service=pod["subdomain"],
        command=container["command"],
        variables={each["name"]: each["value"] for each in container["env"]},
        cpus=container["resources"]["limits"]["cpu"],
    )


def test_there_are_manifests() -> None:
    """The page of the pods has some."""
    assert PODS in PAGES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_each_field_is_one_of_kubernetes(path: Path) -> None:
    """No field is unknown or misplaced, in the oldest and in the newest version."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for version in (OLDEST, validate.latest_version()):
        for resource in manifests(path):
            validate.validate(resource, version, strict=True)


def test_the_pods_find_rank_0() -> None:
    """The names and numbers that Kubernetes does not compare agree."""
    found = {each["kind"]: each for each in manifests(PODS)}
    job = job_of(manifests(PODS))
    service, spec = found["Service"], found["Job"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job.name}
    assert service["metadata"]["name"] == job.service
    assert job.variables["MASTER_ADDR"] == f"{job.name}-0.{job.service}"
    assert spec["completionMode"] == "Indexed"
    assert int(job.variables["WORLD_SIZE"]) == job.size == spec["parallelism"]
    assert job.variables["OMP_NUM_THREADS"] == job.cpus
