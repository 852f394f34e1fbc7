"""What stands so far, in a few seconds: blocks, one set of weights, three ways to run them, a Hub directory.

python examples/tour.py [DIRECTORY]     # the model is written to DIRECTORY (default: runs/tour)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from tstar.model.attention import prepare
from tstar.model.attention.store import KVStore, StoreRow
from tstar.model.checkpoint import load_model, save_model
from tstar.model.config import ModelConfig
from tstar.model.head import target_log_probs
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import Partition

MASK = 500
CONFIG = ModelConfig(
    model_type="sdar",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    mask_token_id=MASK,
    block_size=4,
)


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tour")
    torch.manual_seed(0)
    show_partitions()
    model = LanguageModel(CONFIG)
    model.initialise(torch.Generator().manual_seed(0))
    partition = Partition(prompt_length=21, response_length=43, block_size=8)
    compare_three_ways(model, partition)
    compare_with_transformers(model, directory)


def show_partitions() -> None:
    print("A prompt of 6 tokens (p) and a response of 13 (r), cut into blocks of B = 4:\n")
    for title, partition in (
        ("standard, P^(0)", Partition(6, 13, 4)),
        ("shifted, P^(B/2)", Partition(6, 13, 4).half_shifted()),
        ("by absolute position", Partition(6, 13, 4, origin="sequence")),
    ):
        tokens = "p" * partition.prompt_length + "r" * partition.response_length
        blocks = partition.prompt_blocks + partition.blocks
        print(f"  {title:<22} {'|'.join(tokens[block.slice] for block in blocks)}")
    print()


def compare_three_ways(model: LanguageModel, partition: Partition) -> None:
    """Packed with gradient, block by block through the KV store, and only the log-probs that matter."""
    clean = torch.randint(MASK, (partition.sequence_length,))
    noisy = clean[partition.prompt_length :].masked_fill(torch.rand(partition.response_length) < 0.5, MASK)
    layout = PackedLayout.clean_and_noisy([partition])
    hidden = model(torch.cat([clean, noisy]), prepare(layout))
    num_pairs, all_pairs = layout.num_visible_pairs, layout.num_tokens**2
    print(f"One packed [clean | noisy] forward: {layout.num_tokens} tokens, "
          f"{num_pairs:,} of {all_pairs:,} attention pairs computed.")  # fmt: skip

    is_masked = noisy == MASK
    chosen = partition.sequence_length + is_masked.nonzero()[:, 0]
    log_probs = target_log_probs(
        hidden[chosen], model.output_weight, clean[partition.prompt_length :][is_masked]
    )
    log_probs.mean().backward()
    print(f"LM head on the {len(chosen)} masked positions alone; mean log-prob {log_probs.mean():.3f} "
          f"(a uniform guess: {-torch.log(torch.tensor(512.0)):.3f}).")  # fmt: skip

    store = KVStore(model.config, num_pages=8, page_size=8)
    worst = 0.0
    with torch.no_grad():
        for block in partition.prompt_blocks + partition.blocks:
            row = StoreRow(block.start, block.stop, tuple(range(8)))
            cached = model(clean[block.slice], store.prepare([row]))
            worst = max(worst, float((cached - hidden[block.slice]).abs().max()))
    print(f"The same text block by block against the KV store: largest difference {worst:.1e}.\n")


def compare_with_transformers(model: LanguageModel, directory: Path) -> None:
    save_model(model, directory, overwrite=True)
    print(f"Written to {directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}")
    # transformers knows SDAR's shape under the name it was derived from.
    peer = transformers.Qwen3ForCausalLM.from_pretrained(
        directory, config=transformers.Qwen3Config.from_json_file(directory / "config.json")
    ).eval()
    again = load_model(directory)
    token_ids = torch.randint(MASK, (300,))
    with torch.no_grad():
        ours = again.logits(again(token_ids, prepare(PackedLayout.causal([300]))))
        theirs = peer(input_ids=token_ids[None]).logits[0]
    difference = float((ours - theirs).abs().max())
    print(f"Read back here and by transformers: logits differ by at most {difference:.1e}.")


if __name__ == "__main__":
    main()
