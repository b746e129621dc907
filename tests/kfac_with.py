"""A KFAC from one flat set of options, of which some are Variant's: tests mix them in tables."""

import dataclasses

from thinwire.systems.kfac import KFAC, Variant

_OF_VARIANT = {field.name for field in dataclasses.fields(Variant)}


def kfac_with(net, sync, **options):
    variant = {name: options.pop(name) for name in _OF_VARIANT & set(options)}
    return KFAC(net, sync, **options, variant=Variant(**variant))
