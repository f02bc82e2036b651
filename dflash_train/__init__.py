"""dflash_train: end-to-end training of DFlash drafters (arXiv 2602.06036). This page is the architecture.

A **target** is the language model somebody serves. A **drafter** proposes the next K-1 tokens in one forward pass; the target checks
them in one pass and keeps the longest right prefix and one token of its own. A DFlash drafter reads hidden states of L target layers
(context features) as keys and values; its queries are a block: the last committed token (the anchor) and K-1 mask tokens.

    prompts --regenerate--> answers --prepare--> samples --extract--> features --train--> checkpoints --evaluate--> report
                                                                      --verify-->                 |------export----> drafter folder

Each stage is `stages/NAME.py: run(config)`, reads the folders of earlier stages and writes its own (`run_folder.py`); `plan` says
beforehand what they take. The rooms:

- **the contract**   `layers.py` is the only place where a layer index changes convention; what a feature dataset, a checkpoint and an
  export were made from is a `FeatureContract`, compared whole whenever one is read.
- **the target**     `target.py` loads it (or only its ends) and identifies it; `weight_files.py` reads single tensors;
  `capture.py` runs it and collects features.
- **the data**       `conversations.py` reads chats, `chat.py` turns them into ids and a loss mask, `samples.py` keeps them on disk.
- **the features**   `features/` plans, writes, checks, reads and verifies the dataset of shards.
- **the drafter**    `blocks.py` anchors and blocks, `masks.py` who sees whom, `attention.py`, `drafter.py` the model (it trains and
  decodes with the same code), `drafter_init.py` a start from the target's layers.
- **the training**   `packing.py` decides which samples meet in which step, `training_data.py` reads them, `trainer.py` takes a step;
  `loss.py`, `optimizer.py`, `ema.py`, `checkpoint.py`; `tracking.py` records the run, `curves.py` draws it.
- **the costs**      `planning.py` counts a step's memory and operations by kind; it follows `drafter.py`, `attention.py` and `loss.py`.
- **the figures**    `acceptance.py` defines tau and replays stored answers, `decoding.py` decodes with the target, both through
  `drafting.py`; `report.py` writes.
- **the consumers**  `serving/` writes what vLLM and SGLang read.
- **the frame**      `cli.py`, `config.py`, `launch.py`, `run_folder.py`, `progress.py`, `atomic.py`, `errors.py`.

Imports go one way: cli -> stages -> the rest -> layers, masks, blocks -> torch. Only cli, stages and run folders see the whole config.
`config.py`, `layers.py` and this file import no torch.

Letters, here and in the axes that end a tensor's name (`features_TLD`): **B** sequences, **T** context tokens, **A** anchors,
**K** block size, **L** captured layers, **D** hidden size, **V** vocabulary, **H** attention heads, **d** size of a head.
"""
