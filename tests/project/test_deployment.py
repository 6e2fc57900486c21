"""What examples/ gives to systemd, Kubernetes, Prometheus and Grafana names what kvtier knows."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.cli import app
from kvtier.cli.serve import server_command
from kvtier.config import load
from kvtier.vllm.hooks.versions import REFERENCE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
MONITORING = ROOT / "examples" / "monitoring"
_METRIC = re.compile(r"kvtier:\w+")
_GROUPED = re.compile(r"\bby \(([^)]*)\)")
_MATCHED = re.compile(r"(\w+)(?:=~|!~|!=|=)\"")
_SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")
OF_ALL = {"instance", "engine"}
"""Labels that Prometheus and vLLM give to every metric."""


def understood(words: list[str]) -> dict[str, Any]:
    """What the command line makes of these words; it complains about wrong ones by raising."""
    assert Path(words[0]).name == "kvtier"
    context = app.load(words[1]).make_context(words[1], words[2:])
    return dict(context.params, rest=context.args)


def in_time(text: str) -> list[str]:
    """A command's words; it is ended in time, so that a slow bucket delays no start for ever."""
    timeout, minutes, *words = shlex.split(text)
    assert (Path(timeout).name, minutes[-1]) == ("timeout", "m")
    assert int(minutes[:-1]) < int(service()["TimeoutStartSec"].removesuffix("min"))
    return words


def service() -> Any:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "kvtier.service")
    return parser["Service"]


def documents() -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_service_of_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CONFIG", "/etc/kvtier/stack.yaml")
    unit = service()
    before, after = unit["ExecStartPre"], unit["ExecStart"]
    assert before.startswith("-"), "a bucket that is down delays no start"
    assert understood(in_time(before[1:]))["size"]
    found = understood(shlex.split(after))
    assert found["rest"] == ["--port", "8000"]
    assert unit["KillMode"] == "mixed"
    assert unit["Restart"] == "always", "vLLM's server ends with 0 when its engine has died"
    text = (DEPLOY / "kvtier.service").read_text()
    assert f"Environment=HOME=/var/cache/{unit['CacheDirectory']}\n" in text, "vLLM writes there"


def test_the_compose_file() -> None:
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["vllm"]
    found = understood(["kvtier", *server["command"]])
    assert found["rest"] == ["--port", "8000"]
    mounted = dict(each.split(":")[:2] for each in server["volumes"])
    assert str(found["config"]) in mounted.values()
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()


def test_the_manifest_of_kubernetes(tmp_path: Path) -> None:
    given, deployment, reached = documents()
    assert reached["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    stack = tmp_path / "stack.yaml"
    stack.write_text(here(given["data"]["stack.yaml"], tmp_path))
    kinds = [tier.kind for tier in load(stack).tiers]
    assert kinds == ["cpu", "nvme", "object"]
    # By itself Kubernetes starts the new pod first, which waits for the GPU of the old one.
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    pod = deployment["spec"]["template"]["spec"]
    (first,), (server,) = pod["initContainers"], pod["containers"]
    shell, _, otherwise = first["command"][2].partition("||")
    assert otherwise.strip() == "true", "a bucket that is down delays no start"
    assert understood(in_time(shell))["size"]
    found = understood([*server["command"], *server["args"]])
    assert found["rest"] == ["--port", "8000"]
    where = Path(found["config"])
    mounts = {each["name"]: each["mountPath"] for each in server["volumeMounts"]}
    assert str(where) == f"{mounts['stack']}/stack.yaml"
    assert mounts["shm"] == "/dev/shm"
    start, alive = server["startupProbe"], server["livenessProbe"]
    assert start["httpGet"] == server["readinessProbe"]["httpGet"] == alive["httpGet"]
    assert start["httpGet"] == {"path": "/health", "port": reached["spec"]["ports"][0]["port"]}
    assert Path(found["model"]).is_relative_to(mounts["models"])
    assert {each["name"] for each in pod["volumes"]} == set(mounts)


def here(text: str, folder: Path) -> str:
    """A stack of another machine, small enough for this one."""
    return re.sub(r"(\d+)GiB", r"\1MiB", text).replace("/kvtier/blocks", str(folder))


def test_values_for_production_stack(tmp_path: Path) -> None:
    """Its chart runs vLLM's own command: these are the flags that `kvtier serve` would give it."""
    values = yaml.safe_load((DEPLOY / "production-stack-values.yaml").read_text())
    (model,) = values["servingEngineSpec"]["modelSpec"]
    config = model["vllmConfig"]
    assert config["enablePrefixCaching"]
    assert config["tensorParallelSize"], "without it the chart mounts no /dev/shm"
    flags = config["extraArgs"]
    command = server_command("m", Path("stack.yaml"), [])[5:]
    at = command.index("--kv-transfer-config"), flags.index("--kv-transfer-config")
    ours, theirs = json.loads(command[at[0] + 1]), json.loads(flags[at[1] + 1])
    stack = theirs["kv_connector_extra_config"].pop("stack")
    del ours["kv_connector_extra_config"]["stack"]
    assert ours == theirs
    for words, where in ((command, at[0]), (flags, at[1])):
        del words[where : where + 2]
    assert sorted(command) == sorted(flags)
    found = load(json.loads(here(json.dumps(stack), tmp_path)))
    assert [tier.kind for tier in found.tiers] == ["cpu", "nvme", "object"]
    assert {each["name"] for each in model["extraVolumes"]} == {
        each["name"] for each in model["extraVolumeMounts"]
    }


def test_values_for_llm_d(tmp_path: Path) -> None:
    values = yaml.safe_load((DEPLOY / "llm-d-values.yaml").read_text())
    (server,), (given,) = values["decode"]["containers"], values["extraObjects"]
    found = understood([*server["command"], *server["args"]])
    assert found["rest"][:2] == ["--port", str(values["routing"]["servicePort"])]
    mounts = {each["name"]: each["mountPath"] for each in server["volumeMounts"]}
    assert str(found["config"]) == f"{mounts['stack']}/stack.yaml"
    assert mounts["shm"] == "/dev/shm"
    assert {each["name"] for each in values["decode"]["volumes"]} == set(mounts)
    assert Path(found["model"]).is_relative_to(values["modelArtifacts"]["mountPath"])
    stack = tmp_path / "stack.yaml"
    stack.write_text(here(given["data"]["stack.yaml"], tmp_path))
    assert [tier.kind for tier in load(stack).tiers] == ["cpu", "nvme", "object"]


def test_the_image_runs_what_the_manifest_calls() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert f"FROM vllm/vllm-openai:v{REFERENCE}\n" in text
    assert 'ENTRYPOINT ["kvtier"]' in text
    written = text.replace("\\\n#", " ").partition("vllm-kvtier:1 serve")[2].splitlines()[0]
    assert understood(["kvtier", "serve", *shlex.split(written)])["model"] == "/models/llama"


def series() -> dict[str, set[str]]:
    """The series of all metrics that docs/reference/metrics.md lists, with their labels. Another
    test compares that list with a server."""
    endings = {"gauge": [""], "gauges": [""], "histogram": ["_bucket", "_sum", "_count"]}
    row = re.compile(r"^\| ((?:`kvtier:\w+`,? )+)\|([^|\n]*)\| (\w+)", re.M)
    return {
        name + ending: set(re.findall(r"\w+", labels)) | ({"le"} if ending == "_bucket" else set())
        for metrics, labels, kind in row.findall((ROOT / "docs/reference/metrics.md").read_text())
        for name in _METRIC.findall(metrics)
        for ending in endings.get(kind, ["_total"])
    }


def expressions() -> Iterator[tuple[str, str]]:
    """Each with the text in which its labels are shown."""
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert {"summary", "description"} == set(rule["annotations"]), rule["alert"]
            yield rule["expr"], "".join(rule["annotations"].values())
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def test_alerts_and_dashboard_name_metrics_that_exist() -> None:
    used = {name for expression, _ in expressions() for name in _METRIC.findall(expression)}
    assert len(used) > 15
    assert used <= series().keys()


def test_the_share_of_hits_is_of_all_that_was_asked_for() -> None:
    # What is left where it is, because loading takes longer, is neither a hit nor a miss.
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    (share,) = [each for each in panels if each["title"].startswith("Blocks that were hit")]
    _, _, asked = share["targets"][0]["expr"].partition(" / ")
    kinds = ("hit", "miss", "hits_skipped")
    assert {f"kvtier:{kind}_blocks_total" for kind in kinds} == set(_METRIC.findall(asked))


def test_what_a_tier_dropped_is_not_said_to_lack_room_alone() -> None:
    # A write that failed counts there, too (docs/reference/metrics.md): more room would not help.
    (shown,) = [shown for text, shown in expressions() if "dropped_blocks" in text]
    assert shown == "{{tier}}: no room, or failed"


def test_alerts_on_single_events_see_one_before_the_first_scrape() -> None:
    # increase() sees nothing of a counter that was 1 when Prometheus met it, of a bad start, say.
    single = [text for text, _ in expressions() if re.match(r"increase\(.*\) > 0", text)]
    assert len(single) == 2
    for text in single:
        (name, *_), during = _METRIC.findall(text), text.partition("[")[2].partition("]")[0]
        assert text == f"increase({name}[{during}]) > 0 or {name} > 0 unless {name} offset {during}"


def test_and_labels_that_these_have() -> None:
    known = series()
    for expression, shown in expressions():
        found = [known[name] for name in _METRIC.findall(expression)] or [{"le"}]
        common = set.intersection(*found) | OF_ALL
        grouped = {label for each in _GROUPED.findall(expression) for label in each.split(", ")}
        assert grouped <= common, expression
        assert set(_MATCHED.findall(expression)) <= set.union(*found) | OF_ALL, expression
        kept = grouped if "sum" in expression or "avg by" in expression else common
        assert set(_SHOWN.findall(shown)) <= kept, expression
