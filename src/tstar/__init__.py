"""tstar trains block-diffusion language models to decode in larger blocks."""

__version__ = "0.1.0"
