"""megastable: a GPT pretraining stack, on DeepSpeed, that keeps itself sane."""

__version__ = "0.1.0"
