"""Say every problem of a shared config at once: python config/validator.py config/….py

`prepare.py` and `train.py` check the same before they begin.
"""

import sys

from penstock import read_config
from penstock.cli import main


def validate() -> None:
    for path in sys.argv[1:]:
        read_config(path)
        print(f"{path}: sufficient")


if __name__ == "__main__":
    main(validate)
