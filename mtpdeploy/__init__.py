"""Deploy SGLang with Multi-Token Prediction over SSH, prove what runs, measure it, and choose from evidence."""

__version__ = "0.1.0"
