"""timm's own train.py, validate.py and inference.py with the models of aaconv, from a checkout TIMM of its repository.

python examples/timm_script.py TIMM/train.py --data-dir imagenet --model aa_resnet50 --amp -b 256
torchrun --nproc-per-node 8 examples/timm_script.py TIMM/train.py --data-dir imagenet --model aa_resnet50 --amp -b 128
python examples/timm_script.py TIMM/validate.py --data-dir imagenet --model aa_resnet50 --checkpoint best.pth.tar
python examples/timm_script.py TIMM/inference.py --data-dir photos --model aa_resnet50 --checkpoint best.pth.tar
"""

import runpy
import sys
from pathlib import Path

import aaconv  # noqa: F401  registers its models with timm

if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    del sys.argv[0]  # the script sees its own name and options
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
