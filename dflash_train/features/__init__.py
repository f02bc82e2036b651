"""The feature dataset on disk: `manifest.json` and `shard-00000.safetensors`, `shard-00001.safetensors`, ...

    samples ──plan──> shards and forwards ──(capture)──> writer ──codec, shard──> files ──reader──> training, evaluation
                                 └──────────────────────> manifest ─────────────────┘

`plan.py` decides from data, seed and settings which samples share a shard and a forward · `codec.py` how feature values are stored ·
`shard.py` one file · `manifest.py` what the dataset is made from and which shards it has · `checks.py` what features have to be like ·
`writer.py` checks and writes rows beside the forward · `reader.py` reads samples · `verify.py` says what is wrong with a shard.

A final name always holds a whole shard; its bytes depend on content alone.
"""
