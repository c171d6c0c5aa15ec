"""A third party's plugin, installed in a folder, is found, loaded and run like our own."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_plugins import FakeSite
from test_toy_conformance import TOY_PLUGIN

from looped_spec import LLM, SamplingParams
from looped_spec.errors import PluginError
from looped_spec.testing.checkpoints import write_checkpoint
from looped_spec.testing.oracle import dense_generate
from looped_spec.testing.toy import TOY_CONFIG, make_toy

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_a_plugin_in_a_folder_runs_its_checkpoint_end_to_end(
    fake_site: FakeSite, tmp_path: Path
) -> None:
    fake_site.add("fake-toy", TOY_PLUGIN)
    toy = make_toy()
    folder = write_checkpoint(toy, tmp_path / "checkpoint", TOY_CONFIG)
    prompts = [[3, 1, 4, 1, 5], [9]]
    expected = [dense_generate(toy, prompt, 8, full_loops=4) for prompt in prompts]
    for num_speculative_tokens in (0, 3):
        llm = LLM(
            str(folder),
            device="cpu",
            num_speculative_tokens=num_speculative_tokens,
            kv_cache_memory_bytes=2**22,
        )
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected


def test_the_checkpoint_alone_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = write_checkpoint(make_toy(), tmp_path / "checkpoint", TOY_CONFIG)
    with pytest.raises(PluginError, match=r"no adapter takes model type 'toy_looped'.*install"):
        LLM(str(folder), device="cpu")
