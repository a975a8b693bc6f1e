"""Which prompts a bench decodes, and the hash that names them."""

import json

import pytest

from mlx_dflash2.bench.workload import built_in, from_file
from mlx_dflash2.errors import DFlash2Error

DOMAINS = ["coding", "agentic", "math", "general"]


def entry(text, **fields):
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": f"answer to {text}"},
    ]
    return {"messages": messages, **fields}


def written(path, *entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def names(workload):
    return [prompt.name for prompt in workload.prompts]


@pytest.fixture
def grouped(tmp_path):
    """Lines of two groups in turn; line 4 is blank."""
    path = written(
        tmp_path / "data.jsonl",
        *(
            entry("one", domain="b"),
            entry("two", domain="a"),
            entry("three", domain="b"),
        ),
    )
    rest = (entry("four", domain="a"), entry("five", domain="b"))
    with path.open("a") as file:
        file.write("\n" + "".join(json.dumps(line) + "\n" for line in rest))
    return path


def test_the_first_of_each_domain_are_chosen():
    for count in (1, 4, 6):
        workload = built_in(per_domain=count)
        assert workload.as_dict()["domains"] == dict.fromkeys(DOMAINS, count)
        assert names(workload)[:count] == names(built_in())[:count]
    assert workload.source == "built-in"


def test_domains_keep_the_order_of_the_file_whatever_was_asked():
    asked = built_in(domains=["math", "coding"], per_domain=2)
    assert names(asked) == ["coding-01", "coding-02", "math-01", "math-02"]
    assert asked == built_in(domains=["coding", "math"], per_domain=2)


def test_a_domain_that_does_not_exist_is_refused_with_those_that_do(grouped):
    known = "no domain 'poetry', expected one of coding, agentic, math, general"
    with pytest.raises(DFlash2Error, match=f"built-in prompts: {known}"):
        built_in(domains=["math", "poetry"])
    with pytest.raises(DFlash2Error, match="data.jsonl: no domain 'math'.* of b, a"):
        from_file(grouped, domains=["math"])


def test_a_file_is_grouped_and_its_prompts_are_named_by_line(grouped):
    workload = from_file(grouped)
    assert names(workload) == ["b-1", "b-3", "b-6", "a-2", "a-5"]
    assert names(from_file(grouped, per_domain=1)) == ["b-1", "a-2"]
    assert names(from_file(grouped, domains=["a"])) == ["a-2", "a-5"]
    assert workload.source == grouped.name


def test_the_final_answer_is_not_in_the_prompt(grouped):
    for prompt in from_file(grouped).prompts:
        assert [message["role"] for message in prompt.messages] == ["user"]


def test_another_field_can_group(tmp_path):
    path = written(tmp_path / "x.jsonl", entry("one", part=3), entry("two", part=1))
    assert names(from_file(path, group_by="part")) == ["3-1", "1-2"]


def test_without_a_domain_the_file_is_one_group(tmp_path):
    path = written(tmp_path / "x.jsonl", entry("one"), entry("two", domain=None))
    assert names(from_file(path)) == ["data-1", "data-2"]


@pytest.mark.parametrize(
    ("fields", "has", "lacks"),
    [([{"domain": "a"}, {}], 1, 2), ([{}, {"domain": 1}], 2, 1)],
)
def test_a_domain_in_some_lines_only_is_refused(tmp_path, fields, has, lacks):
    path = written(tmp_path / "x.jsonl", *(entry("one", **field) for field in fields))
    message = f"x.jsonl: line {has} has the field 'domain', line {lacks} has not"
    with pytest.raises(DFlash2Error, match=message):
        from_file(path)


@pytest.mark.parametrize("fields", [[{}, {}], [{"part": 1}, {}]])
def test_a_field_that_was_asked_for_must_be_in_every_line(tmp_path, fields):
    path = written(tmp_path / "x.jsonl", *(entry("one", **field) for field in fields))
    with pytest.raises(DFlash2Error, match=r"line \d: has no field 'part' to group by"):
        from_file(path, group_by="part")


def test_a_line_with_nothing_to_answer_is_refused(tmp_path):
    alone = {"messages": [{"role": "assistant", "content": "hello"}]}
    path = written(tmp_path / "x.jsonl", entry("one"), alone)
    with pytest.raises(DFlash2Error, match="x.jsonl: line 2: nothing is left"):
        from_file(path)


def test_the_hash_does_not_depend_on_place_or_form(tmp_path, grouped):
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(grouped.read_bytes())
    assert from_file(moved).sha256 == from_file(grouped).sha256
    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "else"}]
    other = written(tmp_path / "s.jsonl", {"conversations": turns, "domain": "b"})
    assert (
        from_file(other).sha256
        == from_file(grouped, domains=["b"], per_domain=1).sha256
    )


def test_the_hash_changes_with_everything_a_target_is_shown(tmp_path):
    def tools(**properties):
        schema = {"type": "object", "properties": properties}
        return [{"name": "f", "parameters": schema}]

    text = {"type": "string"}
    variants = [
        *(entry("one"), entry("two"), entry("one", domain="a")),
        entry("one", tools=tools()),
        *(
            entry("one", tools=tools(a=text, b=text)),
            entry("one", tools=tools(b=text, a=text)),
        ),
    ]
    read = [
        from_file(written(tmp_path / f"{number}.jsonl", variant))
        for number, variant in enumerate(variants)
    ]
    assert len({workload.sha256 for workload in read}) == len(variants)
    assert read[0].prompts[0].sha256 == read[2].prompts[0].sha256
    assert len({workload.prompts[0].sha256 for workload in read}) == len(variants) - 1


def test_the_hash_of_the_built_in_prompts_is_one_of_their_choice():
    hashes = {built_in(per_domain=count).sha256 for count in (1, 2, 6, None)}
    assert len(hashes) == 4
    assert built_in(per_domain=6).as_dict()["sha256"] in hashes
    assert built_in().sha256 == built_in(per_domain=12).sha256
