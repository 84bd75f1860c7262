"""JSON from disk: what is wrong with it names the file."""

import json

import pytest

from aaconv.utils.json_file import DEEPEST, read_json


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 100_000, "is not opened: its JSON is nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is not opened: its JSON is nested too deeply"),
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe\xfa", "is not JSON"),
        (b"1" * 5000, "is not JSON"),
    ],
    ids=range(6),
)
def test_what_cannot_be_read_is_named(data, reason, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=reason) as error:
        read_json(path)
    assert str(error.value).startswith(str(path))


def test_half_letters_are_replaced_and_whole_ones_kept(tmp_path):
    path = tmp_path / "file.json"
    path.write_text(r'{"a\ud800": ["x\udc00y", 1, null, {"b": "\ud83d\ude00"}], "plain": "\u00e4"}')
    found = read_json(path)
    assert found == {"a\N{REPLACEMENT CHARACTER}": ["x\N{REPLACEMENT CHARACTER}y", 1, None, {"b": "😀"}], "plain": "ä"}
    str(found).encode()


def test_as_deep_as_anybody_writes_is_read_and_brackets_in_texts_do_not_count(tmp_path):
    path = tmp_path / "file.json"
    deep = "[" * DEEPEST + "]" * DEEPEST
    texts = json.dumps({"name": "[" * 500, r"quoted \" [[[": ["{" * 500] * 3})
    path.write_text(f"[{deep[1:-1]}, {texts}]")
    assert len(read_json(path)) == 2
    path.write_text(f"[{deep}]")
    with pytest.raises(ValueError, match=f"nested too deeply, more than {DEEPEST} levels"):
        read_json(path)
