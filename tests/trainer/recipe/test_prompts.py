"""Files of prompts, negative prompts and seeds in recipes."""

import pytest
from pydantic import ValidationError

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.recipe.prompts import PromptLine, read_prompts
from diffusionpipe.trainer.recipe.recipe_file import recipe_from_table, recipe_to_toml
from diffusionpipe.trainer.recipe.sampling_section import SamplingSection

BASE = {"model": {"path": "m"}, "data": {"train": "d", "resolution": 8}, "training": {"steps": 1, "batch": 4}}


def test_a_file_has_a_prompt_on_each_line_and_comments(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('# birds\na wren\n\n  an owl, at night \n{"prompt": "a tit", "negative_prompt": "blurry"}\n')
    assert read_prompts(path) == (
        PromptLine("a wren", None),
        PromptLine("an owl, at night", None),
        PromptLine("a tit", "blurry"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a\n{"prompt": \n', ":2: not JSON"),
        ('{"negative_prompt": "a"}', ':1: "prompt" is missing'),
        ('{"prompt": "a", "negativ": "b"}', ":1: unknown key 'negativ'; did you mean 'negative_prompt'?"),
        ('{"prompt": 3}', ":1: 'prompt' must be a text; got 3"),
        ("# nothing\n", "has no prompts"),
    ],
)
def test_wrong_lines_are_named(tmp_path, text, message):
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_prompts(path)
    assert f"{path}" in str(caught.value)
    assert message in str(caught.value)


def test_all_wrong_lines_are_named_at_once(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('{"prompt": 3}\na\n{"prompt"\n')
    with pytest.raises(RecipeError, match=r"(?s):1: .*:3: "):
        read_prompts(path)


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="there is no file of prompts"):
        read_prompts(tmp_path / "gone.txt")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(RecipeError, match="not a text file in UTF-8"):
        read_prompts(tmp_path / "picture.png")


def test_a_recipe_reads_a_file_of_prompts_and_its_resolved_form_needs_no_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('a wren\n{"prompt": "a tit", "negative_prompt": "blurry"}\n')
    recipe = recipe_from_table({**BASE, "sampling": {"prompts": str(path)}}, source="a.toml")
    assert recipe.sampling.prompts == ("a wren", "a tit")
    assert recipe.sampling.negatives == ("", "blurry")
    path.unlink()
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(recipe))
    import tomllib

    again = recipe_from_table(tomllib.loads(recipe_to_toml(recipe)), source="a.toml")
    assert again == recipe


def test_lines_without_a_negative_prompt_take_the_recipes(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('a wren\n{"prompt": "a tit", "negative_prompt": "blurry"}\n')
    section = SamplingSection.model_validate({"prompts": str(path), "negative_prompt": "dark"})
    assert section.negatives == ("dark", "blurry")


def test_the_recipe_names_file_and_line_of_a_wrong_prompt(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('a wren\n{"prompt": 3}\n')
    with pytest.raises(RecipeError, match=rf"sampling\.prompts: {path}:2: 'prompt' must be a text"):
        recipe_from_table({**BASE, "sampling": {"prompts": str(path)}}, source="a.toml")


def test_one_negative_prompt_belongs_to_all_prompts():
    section = SamplingSection.model_validate({"prompts": ["a", "b"], "negative_prompt": "dark"})
    assert section.negatives == ("dark", "dark")
    assert SamplingSection.model_validate({"prompts": ["a", "b"]}).negatives == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"labels": [1], "negative_prompt": "dark"}, "there are no prompts"),
        ({"prompts": ["a"], "guidance": 1.0, "negative_prompt": "dark"}, "no effect without guidance"),
        ({"prompts": ["a", "b", "c"], "negative_prompt": ["d", "e"]}, "2 negative prompts do not match 3 prompts"),
    ],
)
def test_negative_prompts_without_effect_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        SamplingSection.model_validate(values)


def test_negative_prompts_of_a_file_and_a_list_do_not_mix(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('{"prompt": "a tit", "negative_prompt": "blurry"}\n')
    with pytest.raises(ValidationError, match="its own negative prompts; remove negative_prompt"):
        SamplingSection.model_validate({"prompts": str(path), "negative_prompt": ["dark"]})
