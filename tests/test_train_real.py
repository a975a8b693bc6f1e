"""SmolLM2-135M-Instruct: a drafter learns some answers, and MLX drafts them."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_runs import row_of, write_data  # noqa: E402

from mlx_dflash2 import generate, load_drafter, load_target  # noqa: E402
from mlx_dflash2.text import encode_prompt  # noqa: E402
from mlx_dflash2.torch.train.config import read_config  # noqa: E402
from mlx_dflash2.torch.train.evaluation import evaluate, find_subject  # noqa: E402
from mlx_dflash2.torch.train.export import export  # noqa: E402
from mlx_dflash2.torch.train.start import find_saved, train  # noqa: E402

QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse.",
    "How do I boil an egg?",
    "Write a Python function that reverses a list.",
    "Describe the city of Lima.",
    "What should I know about bees?",
)
ANSWER = 49  # tokens: the first, and six blocks of eight
SETTINGS = {
    "drafter.layers": 1,
    "drafter.mask_token_id": 4,  # <reponame>
    "drafter.selector_rank": 64,
    "cache_features": True,
    "steps": 150,
    "stages.backbone": 60,
    "stages.selector": 40,
    "batch.rows": 2,
    "batch.rows_at_once": 2,
    "batch.anchors": 48,
    "batch.blocks_at_once": 96,
    "batch.head_tokens": 2000,
    "optimizer.lr": 1e-3,
    "optimizer.high_lr": 2e-3,
    "optimizer.warmup": 10,
    "evaluation.every": 0,
    "checkpoints.every": 1000,
    "threads": 1,
}


@pytest.mark.real
def test_an_overfitted_drafter_drafts_in_mlx_what_it_learned(smollm2, tmp_path):
    target, tokenizer = load_target(smollm2)
    prompts = [
        encode_prompt(tokenizer, [{"role": "user", "content": question}])
        for question in QUESTIONS
    ]

    def decoded(drafter):
        return [
            generate(target, drafter, tokenizer, prompt, max_tokens=ANSWER)
            for prompt in prompts
        ]

    answers = [each.tokens for each in decoded(None)]
    rows = [row_of(*pair) for pair in zip(prompts, answers, strict=True)]
    data = write_data(tmp_path / "data", smollm2, rows, rows)
    models = {"target": str(smollm2), "data": str(data), "threads": 1}
    run = {"out": str(tmp_path / "run")}
    assert train(read_config(flags=SETTINGS | models | run)) == 0
    saved = find_saved(tmp_path / "run")
    trained = saved.progress.evaluation["acceptance_length"]
    assert trained >= 7.5

    export(saved, tmp_path / "drafter")
    found = evaluate(find_subject(str(tmp_path / "drafter"), "best", models))
    drafted = decoded(load_drafter(tmp_path / "drafter", target))
    assert [each.tokens for each in drafted] == answers
    cycles = sum(each.stats.cycles for each in drafted)
    emitted = sum(sum(each.stats.emitted_per_cycle) for each in drafted)
    assert emitted == found["tokens"]
    assert cycles == found["cycles"]
    assert emitted / cycles == pytest.approx(trained, rel=0.02)  # bf16 may move a draft
