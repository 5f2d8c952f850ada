"""Script that a launcher starts: it uses the ranks through its arguments before the trainer exists."""

from pathlib import Path

from forgather.hf import HfArgumentParser, Trainer, TrainingArguments
from tests.guarantees.drop_in.programs import collate, rows
from tests.support.tiny_models import tiny_llama


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    assert args.device.type == "cpu" and args.world_size == 2
    prepared = Path(args.output_dir, "prepared")
    with args.main_process_first(desc="preparing the data"):
        if args.process_index == 0:
            prepared.parent.mkdir(parents=True, exist_ok=True)
            prepared.write_text("once")
        assert prepared.read_text() == "once"
    trainer = Trainer(tiny_llama(), args, collate, rows(), rows(5))
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"evaluated on {args.world_size} ranks: {metrics['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
