"""A preset decides what an engine may run, what it believes of costs, and what it expects."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from looped_spec import LLM
from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError
from looped_spec.layers.native import BuildError
from looped_spec.presets import AcceptanceEntry, Preset, Provenance
from looped_spec.runtime.graphs import TracedGraphs
from looped_spec.runtime.preset_use import fitted

ARMS = (PLAIN, Candidate(1, 1), Candidate(3, 2))


FOLDER = str(Path(__file__).parent.parent / "golden" / "ouro-b")


def _load(**options: Any) -> LLM:
    return LLM(FOLDER, **{"max_num_seqs": 8, **options})


@pytest.fixture(scope="module")
def made() -> Preset:
    """A preset of exactly the runs of `_load`."""
    return _preset(_load(preset="none"))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where presets are looked for first."""
    monkeypatch.setenv("LOOPED_SPEC_PRESET_DIR", str(tmp_path))
    return tmp_path


def _preset(llm: LLM, **changes: Any) -> Preset:
    """A preset of exactly this run."""
    run = llm.identity
    origin = Provenance("measured", "2026-11-30", command="by hand")
    preset = Preset(
        model=run.model,
        adapter=run.adapter,
        device_name=run.device_name,
        dtype=run.dtype,
        full_loops=run.full_loops,
        adapter_options=run.adapter_options,
        config=AdaptiveSpecConfig(
            run.full_loops, (BatchBucket(1, 2, ARMS, 2), BatchBucket(3, 8, ARMS[:2], 1))
        ),
        cost=CostTable.of(
            {
                (b, 0, c.num_speculative_tokens, c.draft_loops): 5.0 + b + c.num_speculative_tokens
                for b in (1, 8)
                for c in ARMS
            },
            run.execution,
        ),
        acceptance=(AcceptanceEntry("maths", "selection", 2, (95.0, 90.0), (100.0, 95.0)),),
        provenance={part: origin for part in ("config", "cost", "acceptance")},
    )
    return dataclasses.replace(preset, **changes)


def _config(llm: LLM) -> AdaptiveSpecConfig:
    assert isinstance(llm.policy, AdaptiveController)
    return llm.policy.config


def test_the_preset_of_a_run_is_taken_without_being_asked_for(
    made: Preset, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made.write(directory / made.file_name)
    with caplog.at_level(logging.INFO):
        llm = _load()
    config = _config(llm)
    assert config.buckets == made.config.buckets
    assert config.cost == made.cost and config.cost.mismatch is None
    assert config.acceptance_prior is not None
    assert config.acceptance_prior.counts[0].accepted == (95.0, 90.0)
    line = f"preset {made.file_name} (LOOPED_SPEC_PRESET_DIR): measured for this device"
    assert [record.message for record in caplog.records].count(line) == 1
    assert llm.stats()["preset"]["line"] == line
    assert llm.stats()["preset"]["exact"] is True
    assert f"note: {line}" in str(llm.explain())


def test_what_a_readout_takes_is_what_the_preset_says(made: Preset, directory: Path) -> None:
    config = dataclasses.replace(made.config, shadow_cost_ratio=0.37)
    dataclasses.replace(made, config=config).write(directory / made.file_name)
    assert _config(_load()).shadow_cost_ratio == 0.37
    assert _config(_load(policy="ema")).shadow_cost_ratio == 0.37


def test_costs_of_another_device_are_a_prior(made: Preset, directory: Path) -> None:
    dataclasses.replace(made, device_name="Other").write(directory / "model=x.json")
    cost = _config(_load()).cost
    assert cost is not None and cost.cells == made.cost.cells
    assert cost.mismatch is not None and cost.mismatch.startswith("device_name is ")


def test_kernels_that_came_down_to_those_of_the_preset_are_no_difference(
    made: Preset, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr("looped_spec.runtime.kernels.Kernels", no_compiler)
    made.write(directory / made.file_name)
    cost = _config(_load(cpu_kernels="auto")).cost
    assert cost is not None and cost.cells == made.cost.cells and cost.mismatch is None


@pytest.mark.parametrize(
    "option",
    [{"cpu_linear": "plain"}, {"num_threads": 2}, {"graph_backend": "traced"}],
)
def test_costs_of_rounds_that_are_run_otherwise_are_a_prior(
    made: Preset, directory: Path, option: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # To trace every round takes a minute, and none is run here.
    monkeypatch.setattr(TracedGraphs, "capture", lambda self, function, tensors: function)
    made.write(directory / made.file_name)
    threads = torch.get_num_threads()
    try:
        cost = _config(_load(**option)).cost
    finally:
        torch.set_num_threads(threads)
    ((name, value),) = option.items()
    assert cost is not None and cost.cells == made.cost.cells
    assert cost.mismatch is not None and f"{name} is '{value}'" in cost.mismatch


@pytest.mark.parametrize(("scale", "fits"), [(1, True), (2.0, False)])
def test_a_default_that_is_given_is_the_same_as_one_that_is_not(
    directory: Path, scale: float, fits: bool
) -> None:
    huginn = str(Path(FOLDER).parent / "huginn-a")
    preset = _preset(LLM(huginn, max_num_seqs=8, preset="none"))
    assert preset.adapter_options["init_scale"] == 1.0
    preset.write(directory / preset.file_name)
    llm = LLM(huginn, max_num_seqs=8, adapter_options={"init_scale": scale})
    assert (llm.preset.preset == preset) is fits
    earlier = dataclasses.replace(preset, adapter_options={})
    earlier.write(directory / preset.file_name)
    again = LLM(huginn, max_num_seqs=8, adapter_options={"init_scale": scale})
    assert (again.preset.preset == earlier) is fits


def test_costs_of_another_device_and_dtype_are_not_used(made: Preset, directory: Path) -> None:
    other = dataclasses.replace(made, device_name="Other", dtype="bfloat16")
    other.write(directory / "model=x.json")
    config = _config(_load())
    assert config.buckets == made.config.buckets
    assert config.cost is not None and config.cost.cells != made.cost.cells


def test_modelled_costs_are_never_taken_for_measured_ones(made: Preset, tmp_path: Path) -> None:
    modelled = dataclasses.replace(made.provenance["cost"], kind="modelled")
    preset = dataclasses.replace(made, provenance={**made.provenance, "cost": modelled})
    preset.write(tmp_path / "p.json")
    cost = _config(_load(preset=str(tmp_path / "p.json"))).cost
    assert cost is not None and cost.mismatch == "the costs of the preset are modelled"


def test_another_revision_weakens_what_is_expected_of_acceptance(
    made: Preset, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    made.write(path)
    exact = _config(_load(preset=str(path))).acceptance_prior
    dataclasses.replace(made, revision="abc").write(path)
    doubted = _config(_load(preset=str(path))).acceptance_prior
    assert exact is not None and doubted is not None
    assert doubted.counts == exact.counts and doubted.trials < exact.trials
    assert _config(_load(preset=str(path))).cost == made.cost


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 8, 300])
def test_buckets_are_cut_or_drawn_out_to_the_run(
    made: Preset, tmp_path: Path, max_num_seqs: int
) -> None:
    made.write(tmp_path / "p.json")
    config = _config(_load(preset=str(tmp_path / "p.json"), max_num_seqs=max_num_seqs))
    assert config.max_num_seqs == max_num_seqs
    assert config.buckets == fitted(made.config.buckets, max_num_seqs)
    assert [b.candidates for b in config.buckets] == [ARMS, ARMS[:2]][: len(config.buckets)]


def test_a_preset_where_speculation_does_not_pay_turns_it_off(made: Preset, tmp_path: Path) -> None:
    off = AdaptiveSpecConfig.pinned(PLAIN, made.full_loops, 8)
    dataclasses.replace(made, config=off).write(tmp_path / "p.json")
    llm = _load(preset=str(tmp_path / "p.json"))
    assert llm.speculation == PLAIN and not isinstance(llm.policy, AdaptiveController)
    asked = _config(_load(preset=str(tmp_path / "p.json"), speculative_adaptive=True))
    assert asked.policy == "goodput" and asked.cost == made.cost
    assert len(asked.candidates) > 1


def test_another_policy_has_the_usual_buckets_with_the_costs_of_the_preset(
    made: Preset, directory: Path
) -> None:
    made.write(directory / made.file_name)
    config = _config(_load(policy="ema"))
    assert config.policy == "ema" and config.cost == made.cost
    assert len({c.draft_loops for c in config.candidates} - {0}) == 1


def test_a_preset_that_was_asked_for_can_run_without_change_of_k_and_d(
    made: Preset, tmp_path: Path
) -> None:
    made.write(tmp_path / "p.json")
    config = _config(_load(preset=str(tmp_path / "p.json"), policy="static"))
    assert config.policy == "static" and config.buckets == made.config.buckets


def test_what_is_set_later_starts_from_the_preset_too(made: Preset, directory: Path) -> None:
    made.write(directory / made.file_name)
    llm = _load()
    llm.set_speculation(1)
    llm.set_adaptive_speculation()
    assert _config(llm).buckets == made.config.buckets


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 2},
        {"speculative_adaptive": False},
        {"policy": "static"},
        {"exit_threshold": 0.5},
        {"preset": "none"},
    ],
)
def test_no_preset_is_looked_for_where_the_options_say_what_runs(
    made: Preset, directory: Path, options: dict[str, Any]
) -> None:
    (directory / made.file_name).write_text("no preset")
    assert _load(**options).preset.preset is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_speculative_tokens": 2}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2, "policy": "static"}, "num_speculative_tokens"),
        ({"speculative_config": {"num_speculative_tokens": 2}}, "speculative_config"),
        ({"speculative_adaptive": False}, "speculative_adaptive=False"),
        ({"speculative_adaptive_config": {}}, "speculative_adaptive_config"),
        ({"exit_threshold": 0.5}, r"early exit \(exit_threshold\)"),
        ({"exit_criterion": "x"}, r"early exit \(exit_criterion\)"),
    ],
)
def test_a_preset_and_another_answer_contradict_each_other(
    made: Preset, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    made.write(tmp_path / "p.json")
    with pytest.raises(ConfigError, match=f"and {named} contradict each other"):
        _load(preset=str(tmp_path / "p.json"), **options)


@pytest.mark.parametrize("preset", ["", " ", 3, None])
def test_a_preset_is_named_by_a_text(preset: Any) -> None:
    with pytest.raises(ConfigError, match="preset must be auto, none, a file or a name"):
        _load(preset=preset)


def test_a_preset_of_another_depth_is_refused_before_weights_are_read(
    made: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.write(tmp_path / "p.json")
    monkeypatch.setattr("looped_spec.loading.load_weights", lambda *args: pytest.fail("read"))
    with pytest.raises(ConfigError, match="full_loops is '2', the preset's"):
        _load(preset=str(tmp_path / "p.json"), full_loops=2)
