"""Writes the demo model as Hugging Face directories OUT-fp32 and OUT-bf16, from which the peers' formats are made.

    python models.py SmolLM2-135M-Instruct.Q4_1.gguf OUT

The values are those of the GGUF's 4-bit weights, whatever the width. The tokenizer is Octavo's reading of the GGUF:
Transformers' own splits digits in another way than the model was trained with. Needs: octavo[cpu,dev].
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from octavo.core.gguf_tokenizer import token_text, tokenizer_from_gguf
from octavo.core.models.gguf_file import GGUFFile


def read_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF, with its chat template."""
    file = GGUFFile(Path(path))
    eos = token_text(file, "eos")
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_from_gguf(file), bos_token=token_text(file, "bos"), eos_token=eos, pad_token=eos
    )
    made.chat_template = file.metadata["tokenizer.chat_template"]
    return made


def main() -> None:
    """Converts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("out")
    args = parser.parse_args()
    tokenizer = read_tokenizer(args.gguf)
    folder, name = os.path.split(os.path.abspath(args.gguf))
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)  # a model that is marked as quantized cannot be saved
    config["pad_token_id"] = tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(config))
    model.load_state_dict(loaded.state_dict())
    for suffix, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        out = Path(f"{args.out}-{suffix}")
        model.to(dtype).save_pretrained(out)
        tokenizer.save_pretrained(out)
        saved = json.loads((out / "config.json").read_text())
        # Readers that are older than Transformers 5 look for these two.
        saved.update(torch_dtype=str(dtype).removeprefix("torch."), rope_theta=config["rope_parameters"]["rope_theta"])
        (out / "config.json").write_text(json.dumps(saved, indent=2))


if __name__ == "__main__":
    main()
