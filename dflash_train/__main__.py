"""`python -m dflash_train` and `accelerate launch -m dflash_train`."""

from dflash_train.cli import main

if __name__ == "__main__":
    main()
