"""Text in, text out: between the engine, which knows ids alone, and whoever speaks with people."""
