"""Collectives of a device's program. It has no mesh: devices have the numbers that XLA gives them."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_softmax import _private
from jax_softmax.devices.layouts import Groups
from jax_softmax.primitives.types import Aval

ir, stablehlo = _private.DIVISION.ir, _private.DIVISION.stablehlo

all_reduce_p = Primitive("jax_softmax_all_reduce")
all_reduce_p.def_abstract_eval(lambda value, *, kind, groups: value)


def _all_reduce(ctx: mlir.LoweringRuleContext, value: Any, *, kind: str, groups: Groups) -> Any:
    reduce = stablehlo.AllReduceOp(
        [value.type],
        [value],
        replica_groups=ir.DenseIntElementsAttr.get(np.array(groups, np.int64)),
        channel_handle=stablehlo.ChannelHandle.get(1, 1),
        use_global_device_ids=ir.BoolAttr.get(True),
    )
    scalar = ir.RankedTensorType.get([], value.type.element_type)
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        operation = {"max": stablehlo.MaxOp, "sum": stablehlo.AddOp}[kind]
        stablehlo.return_([operation(*block.arguments).result])
    return reduce.results


mlir.register_lowering(all_reduce_p, _all_reduce)

all_to_all_p = Primitive("jax_softmax_all_to_all")


def _type_of_all_to_all(a: Aval, *, groups: Groups, split: int, concatenated: int) -> Aval:
    shape = list(a.shape)
    shape[split] //= len(groups[0])
    shape[concatenated] *= len(groups[0])
    return a.update(shape=tuple(shape))


all_to_all_p.def_abstract_eval(_type_of_all_to_all)


def _all_to_all(ctx: mlir.LoweringRuleContext, a: Any, *, groups: Groups, split: int, concatenated: int) -> Any:
    return stablehlo.AllToAllOp(
        [a],
        split_dimension=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), split),
        concat_dimension=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), concatenated),
        split_count=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), len(groups[0])),
        replica_groups=ir.DenseIntElementsAttr.get(np.array(groups, np.int64)),
        channel_handle=stablehlo.ChannelHandle.get(1, 1),
    ).results


mlir.register_lowering(all_to_all_p, _all_to_all)

device_number_p = Primitive("jax_softmax_device_number")
device_number_p.def_abstract_eval(lambda: jax.core.ShapedArray((), np.dtype(np.uint32)))
mlir.register_lowering(device_number_p, lambda ctx: stablehlo.PartitionIdOp().results)
