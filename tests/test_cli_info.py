"""``info``, ``pin``, ``unpin``, ``annotate``: what a checkpoint says about itself."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import protocol
import pytest
from cli_runs import run, run_json
from handmade import Item, Value, pattern, rows, whole, write_checkpoint

from remote_ckpt.changes import set_pinned
from remote_ckpt.keys import manifest_key
from remote_ckpt.store import open_store
from remote_ckpt.store.base import Store

_numbers = itertools.count()

ITEMS: dict[str, Item] = {
    "model.weight": rows((6, 4), pattern(24), [2, 4]),
    "model.bias": whole((4,), pattern(8), "bfloat16"),
    "optim.exp_avg": whole((), pattern(4), "float32"),
    "extra": Value(b"\x80pickle"),
}


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://cli-info-{next(_numbers)}/run" if request.param == "memory" else str(tmp_path / "run")


@contextmanager
def opened(url: str) -> Iterator[Store]:
    with closing(open_store(url)) as root:
        yield root


@pytest.fixture
def checkpoint(url: str) -> str:
    with opened(url) as root:
        write_checkpoint(root, "7", ITEMS)
    return f"{url}/7"


class TestInfo:
    def test_facts_of_the_manifest_come_first(self, checkpoint: str) -> None:
        shown = run("info", checkpoint)
        assert (shown.code, shown.stderr) == (0, "")
        facts = dict(row[:2] for row in shown.rows[1:12] if len(row) == 2)
        assert shown.lines[0] == "7"
        assert facts["url"] == checkpoint
        assert facts["kind"] == "remote_ckpt"
        assert facts["ranks"] == "2"
        assert facts["pinned"] == "no"
        assert facts["size"].endswith(" in 2 objects")
        assert facts["committed"].endswith("Z (0s ago)")

    def test_tensors_are_a_table_of_shape_dtype_size_and_placement(self, checkpoint: str) -> None:
        table = run("info", checkpoint).rows
        start = table.index(["tensor", "shape", "dtype", "size", "chunks", "objects"])
        assert table[start + 1 : start + 4] == [
            ["model.bias", "[4]", "bfloat16", "8 B", "1", "1"],
            ["model.weight", "[6,4]", "uint8", "24 B", "2", "2"],
            ["optim.exp_avg", "[]", "float32", "4 B", "1", "1"],
        ]

    def test_values_follow_and_totals_end(self, checkpoint: str) -> None:
        table = run("info", checkpoint).rows
        start = table.index(["value", "size", "object", "first byte"])
        assert table[start + 1][:2] == ["extra", "7 B"]
        assert table[-1] == ["3 tensors, 1 value, 43 B"]

    def test_a_pattern_filters_and_totals_are_of_what_is_left(self, checkpoint: str) -> None:
        table = run("info", checkpoint, "--pattern", "model.*").rows
        assert table[-1] == ["2 tensors, 0 values, 32 B"]
        assert ["optim.exp_avg", "[]", "float32", "4 B", "1", "1"] not in table
        document = run_json("info", checkpoint, "--pattern", "model.b*", "--pattern", "extra")["checkpoints"][
            0
        ]
        assert [tensor["name"] for tensor in document["tensors"]] == ["model.bias"]
        assert [value["name"] for value in document["values"]] == ["extra"]
        assert document["contents_bytes"] == 15

    def test_chunks_say_where_the_bytes_lie(self, url: str, checkpoint: str) -> None:
        document = run_json("info", checkpoint, "--chunks", "--pattern", "model.weight")["checkpoints"][0]
        chunks = document["tensors"][0]["chunks"]
        assert [(chunk["offsets"], chunk["sizes"]) for chunk in chunks] == [
            ([0, 0], [2, 4]),
            ([2, 0], [4, 4]),
        ]
        with opened(url) as root:
            places = [(f"7/{chunk['key']}", chunk["offset_bytes"], chunk["length_bytes"]) for chunk in chunks]
            assert b"".join(root.read_range(*place) for place in places) == pattern(24)
        table = run("info", checkpoint, "--chunks", "--pattern", "model.weight").rows
        start = table.index(["tensor", "offsets", "sizes", "object", "first byte", "bytes"])
        first = chunks[0]
        assert table[start + 1] == [
            *("model.weight", "[0,0]", "[2,4]", first["key"], str(first["offset_bytes"]), "8"),
        ]

    def test_json_says_the_same_without_chunks(self, checkpoint: str) -> None:
        document = run_json("info", checkpoint)["checkpoints"][0]
        assert document["tensors"][1] == {
            "name": "model.weight",
            "shape": [6, 4],
            "dtype": "uint8",
            "total_bytes": 24,
            "chunk_count": 2,
            "object_count": 2,
        }
        assert set(document["values"][0]) == {"name", "key", "offset_bytes", "length_bytes", "is_safe"}
        assert document["world_size"] == 2

    def test_without_contents_the_index_is_not_read(self, url: str, checkpoint: str) -> None:
        with opened(url) as root:
            root.delete([info.key for info in root.list("7/") if "index." in info.key])
        assert run("info", checkpoint).code == 6
        shown = run("info", checkpoint, "--no-contents")
        assert (shown.code, shown.lines[0]) == (0, "7")
        assert "tensors" not in shown.stdout
        assert "tensors" not in run_json("info", checkpoint, "--no-contents")["checkpoints"][0]

    def test_several_are_shown_and_one_that_is_missing_does_not_hide_the_others(
        self, url: str, checkpoint: str
    ) -> None:
        shown = run("info", f"{url}/1", checkpoint, "--json")
        assert shown.code == 3
        assert [document["name"] for document in shown.document["checkpoints"]] == ["7"]
        error = json.loads(shown.stderr)["error"]
        assert set(error) == {"type", "message", "url", "key", "step"}
        assert (error["type"], error["step"]) == ("CheckpointNotFoundError", "1")

    def test_a_damaged_manifest_is_an_error_of_its_own(self, url: str, checkpoint: str) -> None:
        with opened(url) as root:
            root.write(f"7/{manifest_key(1)}", b"{")
        shown = run("info", checkpoint)
        assert (shown.code, shown.stdout) == (6, "")
        assert shown.stderr.startswith("error: the manifest is damaged")

    def test_a_plain_checkpoint_has_facts_and_no_table(self, url: str) -> None:
        with opened(url) as root:
            root.write("eval/checkpoint.pth", b"plain")
        shown = run("info", f"{url}/eval")
        assert (shown.code, shown.stderr) == (0, "")
        assert ["kind", "plain"] in shown.rows
        assert "tensor" not in shown.stdout

    def test_twenty_thousand_tensors_take_seconds(self, tmp_path: Path) -> None:
        data = pattern(16)
        with opened(str(tmp_path)) as root:
            write_checkpoint(
                root, "1", {f"layer.{number}.weight": whole((16,), data) for number in range(20_000)}
            )
        began = time.monotonic()
        shown = run("info", tmp_path / "1")
        assert shown.rows[-1] == ["20000 tensors, 0 values, 312 KiB"]
        assert len(shown.lines) > 20_000
        assert time.monotonic() - began < 20


class TestPins:
    def test_pin_and_unpin_change_what_ls_shows(self, url: str, checkpoint: str) -> None:
        pinned = run("pin", checkpoint)
        assert (pinned.code, pinned.stdout) == (0, f"{checkpoint}: pinned\n")
        assert run("ls", url).rows[1][6] == "pinned"
        assert run_json("unpin", checkpoint)["checkpoints"][0]["pinned"] is False
        assert run("ls", url).rows[1][6] == "-"

    def test_several_at_once_and_the_first_error_decides(self, url: str, checkpoint: str) -> None:
        with opened(url) as root:
            write_checkpoint(root, "8", ITEMS)
        done = run("pin", f"{url}/1", checkpoint, f"{url}/8")
        assert (done.code, done.lines) == (3, [f"{checkpoint}: pinned", f"{url}/8: pinned"])
        assert done.stderr.startswith("error: ")

    def test_a_stock_checkpoint_cannot_be_pinned(self, url: str) -> None:
        with opened(url) as root:
            root.write("5/.metadata", b"stock")
        refused = run("pin", f"{url}/5")
        assert (refused.code, refused.stdout) == (3, "")
        assert "no checkpoint with a manifest" in refused.stderr

    def test_a_pin_that_is_there_is_no_error(self, url: str, checkpoint: str) -> None:
        with opened(url) as root:
            set_pinned(root.scope("7"), True)
        assert run_json("pin", checkpoint)["checkpoints"][0]["generation"] == 2


class TestAnnotate:
    def test_metrics_and_metadata_are_added(self, checkpoint: str) -> None:
        done = run(
            "annotate", checkpoint, "--metric", "loss=0.5", "--metric", "acc=nan", "--metadata", 'by="me"'
        )
        assert (done.code, done.stdout) == (0, f"{checkpoint}: metrics acc=nan loss=0.5\n")
        document = run_json("annotate", checkpoint, "--metric", "loss=-1", "--metadata", "tags=[1, 2]")
        found = document["checkpoints"][0]
        assert found["metrics"] == {"acc": "nan", "loss": -1.0}
        assert found["metadata"] == {"by": "me", "tags": [1, 2]}

    def test_nothing_to_add_is_a_wrong_call(self, checkpoint: str) -> None:
        refused = run("annotate", checkpoint)
        assert refused.code == 2
        assert refused.stderr == ("error: give --metric or --metadata (see remote-ckpt annotate --help)\n")

    @pytest.mark.parametrize("metric", ["loss", "loss=low", "=1"])
    def test_what_is_no_number_is_a_wrong_call(self, url: str, checkpoint: str, metric: str) -> None:
        assert run("annotate", checkpoint, "--metric", metric).code == 2
        assert run_json("ls", url)["checkpoints"][0]["metrics"] == {}


def test_a_second_name_for_metadata_replaces_the_first(url: str) -> None:
    with opened(url) as root:
        protocol.save(root, b"x", name="1")
    run("annotate", f"{url}/1", "--metadata", "note=old")
    run("annotate", f"{url}/1", "--metadata", "note=new")
    assert run_json("info", f"{url}/1", "--no-contents")["checkpoints"][0]["metadata"]["note"] == "new"
