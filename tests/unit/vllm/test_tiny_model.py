"""The small random model: what is refused before anything is built (building needs torch)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.vllm import tiny_model


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"family": "gpt5"}, "choose one of llama"),
        ({"layers": 0}, "at least 1"),
        ({"hidden": 100}, "a multiple of 128"),
        ({"hidden": 0}, "a multiple of 128"),
    ],
)
def test_wrong_shapes_are_refused(tmp_path: Path, wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_model.build(tmp_path / "model", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


def test_a_built_model_is_kept(tmp_path: Path) -> None:
    described = {"family": "llama", "layers": 4, "hidden": 256, "seed": 0}
    (tmp_path / tiny_model.DESCRIPTION_FILE).write_text(json.dumps(described))
    assert tiny_model.build(tmp_path) == tmp_path


@pytest.mark.parametrize("text", ["{}", "not json", '{"family": "llama", "layers": 5}'])
def test_another_model_in_the_folder_is_never_overwritten(tmp_path: Path, text: str) -> None:
    description = tmp_path / tiny_model.DESCRIPTION_FILE
    description.write_text(text)
    with pytest.raises(ConfigError, match="name another folder"):
        tiny_model.build(tmp_path)
    assert description.read_text() == text


@pytest.mark.parametrize("seed", [0, 1])
def test_two_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The slower one finds the other's, and refuses it if it is not the same."""
    target = tmp_path / "model"
    theirs = json.dumps({"family": "llama", "layers": 4, "hidden": 256, "seed": seed})

    def save_weights(folder: Path, config: object, own: int, loaded_by: str) -> None:
        target.mkdir()
        (target / tiny_model.DESCRIPTION_FILE).write_text(theirs)

    nothing = tiny_model.Family(lambda layers, hidden: None, lambda folder: None)
    monkeypatch.setitem(tiny_model.FAMILIES, "llama", nothing)
    monkeypatch.setattr(tiny_model, "_save_weights", save_weights)
    if seed:
        with pytest.raises(ConfigError, match="name another folder"):
            tiny_model.build(target)
    else:
        assert tiny_model.build(target) == target
    assert (target / tiny_model.DESCRIPTION_FILE).read_text() == theirs
    assert list(tmp_path.iterdir()) == [target], "what was half built is gone"
