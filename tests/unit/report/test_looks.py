from thinwire.core.words import factor, volume
from thinwire.tools.pictures.colours import Colours, ink, shade
from thinwire.tools.report.figures import hover, plain, short


def test_one_colour_per_method_everywhere():
    colours = Colours([["ddp", "thinwire acp"], ["acp", "acp rank=8", "ssgd"], ["acp:rank=8"]])
    assert colours.of("thinwire acp") == colours.of("acp")
    assert colours.of("acp rank=8") == colours.of("acp:rank=8") != colours.of("acp")
    assert len({colours.of(name) for name in ("ddp", "acp", "ssgd")}) == 3
    both = Colours([["acp"], ["acp rank=4"]])  # a variant that is never side by side with its method
    assert both.of("acp") == both.of("acp rank=4") == Colours([["acp rank=4"]]).of("acp rank=4")
    assert Colours([["dense"], ["ssgd"]]).of("dense") == Colours([["ssgd"]]).of("ssgd")


def test_unknown_methods_get_what_is_free():
    colours = Colours([["ddp", "mine", "yours", "ssgd"]])
    assert len({colours.of(name) for name in ("ddp", "mine", "yours", "ssgd")}) == 4
    assert Colours([[f"m{i}" for i in range(50)]]).of("m49").startswith("#")
    assert colours.of("never seen").startswith("#")


def test_shades_and_ink():
    assert ink("#000000") == "#ffffff"
    assert ink("#f0e442") != "#ffffff"
    assert shade("#102030", 0) == "#102030"


def test_words():
    assert [factor(value) for value in (1.0, 9.94, 12.34, 224.2)] == ["1.00×", "9.94×", "12.3×", "224×"]
    assert [volume(n) for n in (None, 279, 8e5, 2.5e7)] == ["-", "0.279 kB", "0.80 MB", "25.0 MB"]
    assert plain("a <b>\n& c") == "a &lt;b&gt; &amp; c"
    assert short("x" * 50, 10) == "x" * 9 + "…"
    assert hover("a <i>", "", "word " * 30).count("<br>") == 3
    assert hover("a <i>").startswith("<b>a &lt;i&gt;</b>")
    assert hover() == "<b></b>"
