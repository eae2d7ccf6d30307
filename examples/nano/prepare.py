"""Fill the queue of a config's dataset: python prepare.py config/train_char_diffusion.py

The same as `penstock prepare`. Killed, it resumes: no batch is repeated or skipped.
"""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "prepare")
    main()
