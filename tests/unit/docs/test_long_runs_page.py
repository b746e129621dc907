"""The page "What local steps cost" is what its script makes of the recorded whole runs."""

import long_runs


def test_the_page_is_made_from_the_record():
    assert long_runs.page(long_runs.whole()) == long_runs.PAGE.read_text()
    assert (long_runs.DOCS / long_runs.PICTURE).is_file()


def test_what_a_row_sends():
    shares = {
        "ddp": 1.0,
        "alone": 0.0,
        "accumulate:every=4": 1 / 4,
        "ssgd:look=0.5": 1.0,
        "local:sync_every=4:codec=int2": 2.125 / 32 / 4,
        "local:sync_every=8:codec=int1:look=0.5": 1.125 / 32 / 8,
    }
    assert {methods: long_runs.sent(methods) for methods in shares} == shares
    assert long_runs.named("local:sync_every=8:codec=int1:look=0.5") == "local, every 8 in 1 bit, look 0.5"
