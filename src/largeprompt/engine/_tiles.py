"""Products of matrices on a processor, by tiles of the result that stay in registers until they are finished."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ._target import broadcast, call, either, on_gpu, tuned
from ._within import within

WIDTH = 16  # of a vector
_ROWS = 4  # of a tile: with two vectors, eight sums at a time hide how long an addition takes
_PLACE = ir.IntType(64)


def _tile(vectors: int):
    """Rows i to i + 3 and so many vectors of columns from j on of out = scale · a b, with that inner dimension.

    Rows of b and out lie in one piece, entries of a anywhere; rows beyond the last are the last one again. A sum runs
    along the inner index in order, each product rounded with it: the order is no choice of the compiler's.
    """

    def tile(context, a, b, i, j, inner, scale, out):
        def generate(context, builder, signature, arguments):
            if on_gpu(context):  # where nothing calls it
                return context.get_dummy_value()
            first, second, result = (
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args, arguments, strict=True)
                if isinstance(kind, types.Array)
            )
            i, j, inner, scale = arguments[2:6]
            real = context.get_value_type(b.dtype)
            vector = ir.VectorType(real, WIDTH)
            suffix = f"v{WIDTH}f{8 * context.get_abi_sizeof(real)}"

            def place(array, row, column, kind):
                down, along = cgutils.unpack_tuple(builder, array.strides)
                offset = builder.add(builder.mul(row, down), builder.mul(column, along))
                return builder.bitcast(cgutils.pointer_add(builder, array.data, offset), kind.as_pointer())

            def columns(array, row, v):
                """The pointer to a vector of the tile's columns."""
                return place(array, row, builder.add(j, ir.Constant(_PLACE, v * WIDTH)), vector)

            last = builder.sub(cgutils.unpack_tuple(builder, result.shape)[0], ir.Constant(_PLACE, 1))
            lines = [builder.add(i, ir.Constant(_PLACE, r)) for r in range(_ROWS)]
            lines = [builder.select(builder.icmp_signed("<", line, last), line, last) for line in lines]
            tile = [(line, v) for line in lines for v in range(vectors)]
            sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in tile]
            for total in sums:  # also where the tile is computed in a loop
                builder.store(ir.Constant(vector, None), total)
            align = context.get_abi_sizeof(real)
            with cgutils.for_range(builder, inner) as loop:
                across = [builder.load(columns(second, loop.index, v), align=align) for v in range(vectors)]
                factors = {
                    line: broadcast(builder, builder.load(place(first, line, loop.index, real)), WIDTH)
                    for line in lines
                }
                for (line, v), total in zip(tile, sums, strict=True):
                    values = [factors[line], across[v], builder.load(total)]
                    builder.store(call(builder, f"llvm.fma.{suffix}", vector, values), total)
            scales = broadcast(builder, scale, WIDTH)
            for (line, v), total in zip(tile, sums, strict=True):
                builder.store(builder.fmul(scales, builder.load(total)), columns(result, line, v), align=align)
            return context.get_dummy_value()

        if a.dtype != b.dtype or out.dtype != b.dtype:
            return None
        return types.none(a, b, types.intp, types.intp, types.intp, b.dtype, out), generate

    return tile


_set_narrow_tile, _set_tile = either(_tile(1), None), either(_tile(2), None)


@within(fastmath={"contract"})
def _set_small_product(a, b, inner, scale, out):
    tuned()
    rows, columns = out.shape
    for i in range(rows):
        for j in range(columns):
            out[i, j] = 0.0
        for k in range(inner):
            factor = scale * a[i, k]
            for j in range(columns):
                out[i, j] += factor * b[k, j]


@within()
def set_product(a, b, inner, scale, out):
    """out = scale · a b with that inner dimension, on a processor."""
    tuned()
    rows, columns = out.shape
    if columns < WIDTH:
        _set_small_product(a, b, inner, scale, out)
        return
    j = 0
    while j + 2 * WIDTH <= columns:
        for i in range(0, rows, _ROWS):
            _set_tile(a, b, i, j, inner, scale, out)
        j += 2 * WIDTH
    while j < columns:
        for i in range(0, rows, _ROWS):  # the last begin within those before, and compute the same there
            _set_narrow_tile(a, b, i, min(j, columns - WIDTH), inner, scale, out)
        j += WIDTH
