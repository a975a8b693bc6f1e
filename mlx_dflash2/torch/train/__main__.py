"""`python -m mlx_dflash2.torch.train`: the command `mlx-dflash2 train`."""

import sys

from mlx_dflash2.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]], prog_name="mlx-dflash2")
