import base64
import hashlib
import json
import re

from diffusionpipe.viz.html_page import page_of

TEXT = '</script><!-- "quotes" \u2028 {{SCRIPT}} <b>'


def test_no_text_of_the_data_ends_its_element_or_becomes_markup():
    page = page_of(json.dumps({"text": TEXT}, ensure_ascii=False), title="a </title><b> & {{DATA}}")
    held = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(held) == {"text": TEXT}
    assert "<b>" not in page.partition("<style>")[0]
    assert page.count("</script>") == 2


def test_the_page_lets_its_browser_ask_for_nothing_and_run_its_own_script_alone():
    page = page_of("{}", title="x")
    rules = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in rules
    assert f"script-src 'sha256-{digest}'" in rules


def test_the_page_names_no_address():
    page = page_of("{}", title="x")
    assert [found for found in re.findall(r"https?://[^\s\"'`]+", page) if "www.w3.org/2000/svg" not in found] == []
