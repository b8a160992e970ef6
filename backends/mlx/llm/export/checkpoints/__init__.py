"""Checkpoints: what a folder or file becomes before it is exported.

`open.open_checkpoint` decides what a path is, once, and returns a `Checkpoint`, which reads the model, the tokenizer
and the head for multi-token prediction when it is asked for them:

    open.py       the decision, and the hub
    checkpoint.py the interface of all kinds
    hf.py         a folder whose weights transformers reads
    mlx.py        a folder of mlx-lm
    quantized.py  a folder of GPTQ, AWQ, compressed-tensors, MXFP4 and so on
    gguf.py       a GGUF file; the folder `gguf` beside this one knows the format

`mlx`, `quantized` and `gguf` build the model without weights, and `install` puts the tensors into it.
`language_part` finds the language model in a model for text and other media, `head` the head for multi-token
prediction, `adapter` merges LoRA adapters, and `checks` has the checks and the errors of damaged checkpoints.
"""
