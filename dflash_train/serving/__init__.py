"""What other programs read: `zlab.py` writes the drafter folder of vLLM and SGLang, `model_card.py` its README."""
