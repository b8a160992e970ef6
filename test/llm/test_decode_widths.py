"""The engine decodes several answers with the narrowest method that takes them all."""

import pytest
from executorch_mlx import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.llm.export.methods import method_kinds
from test_families import FAMILIES, random_model

LAYERS, ROWS = 2, 8


@pytest.mark.parametrize(
    "rows, widths", [(1, []), (2, []), (3, [2]), (4, [2]), (5, [2, 4]), (8, [2, 4]), (9, [2, 4, 8])]
)
def test_methods_for_fewer_rows_than_the_program_has(rows, widths):
    kinds = method_kinds("tokens", rows, verify=True, draft=False)
    narrow = {name: kind.width for name, kind in kinds.items() if name.startswith("decode_")}
    assert narrow == {f"decode_{width}": width for width in widths}
    assert rows == 1 or kinds["decode"].width == rows


def row_counts(profile):
    """The numbers of rows in the calls of several rows. Each row has a position and an index: two ItemIntNodes."""
    from executorch.devtools import Inspector

    blocks = [[event.name for event in block.events] for block in Inspector(etdump_path=profile).event_blocks]
    several = [names for names in blocks if any("RowSdpaNode" in name for name in names)]
    return {sum("ItemIntNode" in name for name in names) // 2 for names in several}


def test_three_answers_do_not_run_the_method_for_eight(tmp_path):
    config, model, changes = FAMILIES["qwen3"]
    model = random_model(config, model, changes | {"num_hidden_layers": LAYERS})
    export_llm(model, batch=ROWS, max_context_len=128, head=HeadConfig(), verify=False).save(tmp_path / "model.pte")
    options = {"max_new_tokens": 60, "ignore_eos": True, "draft": 0, "temperature": 0.8, "seed": 3}
    with LLM.load(tmp_path / "model.pte", profile=True) as llm:
        alone = [llm.generate([5 + i, 6, 7], **options).result().tokens for i in range(3)]
        together = [llm.generate([5 + i, 6, 7], **options) for i in range(3)]
        assert [generation.result().tokens for generation in together] == alone
        llm.program.write_profile(tmp_path / "profile.etdp")
    counts = row_counts(tmp_path / "profile.etdp")
    assert counts and counts <= {2, 4}
