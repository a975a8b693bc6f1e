"""SmolLM2-135M-Instruct in its own groups, and a random drafter for any target."""

import json
from pathlib import Path

import click
import numpy as np
from pair_files import write_checkpoint, write_json
from pairs import PairOptions, drafter_config, random_drafter, spread_taps

from mlx_dflash2.demo import demo_target, installed_gguf
from mlx_dflash2.gguf import write_model


def write_quantized_smollm2(out: Path) -> Path:
    """The model in the 4-bit groups of its own file, as MLX keeps them."""
    out.mkdir(parents=True)
    write_model(installed_gguf(), out, quantized=True)
    return out


def write_random_drafter(
    target: Path,
    out: Path,
    seed: int = 0,
    *,
    layers: int = 2,
    rank: int = 64,
    mask_token_id: int = 0,
    dtype: str = "float32",
    identity_convolutions: bool = False,
    **options,
) -> Path:
    """Write a randomly initialised DFlash 2 drafter for the llama model `target`.

    Args:
        mask_token_id: Any id of the vocabulary; it need not be a special token.
        identity_convolutions: Start the convolutions as the identity, as training
            does; otherwise they are random.
        options: Further fields of `pairs.PairOptions`, such as block_size.
    """
    config = json.loads((target / "config.json").read_text())
    heads = config["num_attention_heads"]
    opts = PairOptions(
        kind="random",
        seed=seed,
        dtype=dtype,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim", config["hidden_size"] // heads),
        vocab=config["vocab_size"],
        draft_layers=layers,
        rank=rank,
        rope_theta=config["rope_theta"],
        **{"taps": spread_taps(config["num_hidden_layers"], 5)} | options,
    ).resolved()
    weights = random_drafter(
        np.random.default_rng(seed), opts, identity_convolutions=identity_convolutions
    )
    described = drafter_config(opts)
    described["dflash_config"]["mask_token_id"] = mask_token_id
    out.mkdir(parents=True)
    write_checkpoint(out, weights, dtype)
    write_json(out / "config.json", described)
    return out


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Of the drafter's weights.")
def main(folder: Path, seed: int) -> None:
    """Write an untrained drafter for `--model demo` into the new FOLDER."""
    click.echo(write_random_drafter(demo_target(), folder, seed))


if __name__ == "__main__":
    main()
