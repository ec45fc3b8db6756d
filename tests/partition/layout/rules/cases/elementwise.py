"""Operations on single entries."""

import functools

import tensorflow as tf

from tests.partition.layout.rules.cases.case import cases_of

_one = functools.partial(cases_of, "ab", broadcast=True)
_two = functools.partial(cases_of, "ab, ab", broadcast=True)
_text = functools.partial(cases_of, "ab:string", broadcast=True)
_complex = functools.partial(cases_of, "ab:complex64")
_base64, _as_string = tf.io.encode_base64, tf.strings.as_string
_UTF = {"input_encoding": "UTF-8", "output_encoding": "UTF-16-BE"}


def _whole(args, names, high=9):
    options = {"low": 1, "high": high, "broadcast": True}
    return cases_of(f"{args}", names, **options)


def _gradients(names, low=-1, high=1):
    return cases_of("ab, ab", names, low=low, high=high)


def _cast(entries, to, low=None, high=None):
    of = {f"Cast_{entries}_{to}": lambda x: tf.cast(x, to)}
    return cases_of(f"ab:{entries}", **of, low=low, high=high)


_NUMBERS = [
    *_one(
        "Exp Expm1 Tanh Sigmoid Sin Cos Tan Sinh Cosh Asinh Atan Erf Erfc "
        "Floor Ceil Round Rint IsFinite IsNan IsInf BesselI0e BesselI1e Abs "
        "Sign Square Softplus Softsign Elu Selu Relu Relu6 LeakyRelu Neg "
        "DeepCopy Snapshot Identity StopGradient PreventGradient Copy "
        "DebugIdentityV2"
    ),
    *_one("Log Log1p Lgamma Digamma Sqrt Rsqrt", low=0.2, high=2),
    *_one("Reciprocal Inv BesselI0 BesselI1", low=0.2, high=2),
    *_one("Asin Acos Atanh Erfinv", low=-0.9, high=0.9),
    *_one("Ndtri", low=0.1, high=0.9),
    *_one("Acosh", low=1.1, high=3),
    *_one("Bucketize", {"boundaries": [0.0, 0.3]}),
    *_two("Maximum Minimum SquaredDifference Atan2 NextAfter"),
    *_two("Less LessEqual Greater GreaterEqual Equal NotEqual"),
    *_two("Sub Add AddV2 Mul MulNoNan"),
    *_two("RealDiv Div DivNoNan Xdivy Pow Xlogy Xlog1py", low=0.3, high=2),
    *_two("FloorDiv FloorMod Igamma Igammac", low=0.3, high=2),
    *_two("Polygamma", low=1, high=1),
    *_two("Zeta", low=1.5, high=2),
    *cases_of("ab, ab", "ApproximateEqual Complex"),
    *cases_of("ab, -, -", "ClipByValue"),
    *cases_of("ab, ab, ab", "Betainc", low=0.1),
    *_complex("ComplexAbs Angle Real Imag Conj"),
    *cases_of(
        "ab",
        **{
            f"Pow_{e}": lambda x, e=e: x**e
            for e in (0, 1, 2, 3, -1, -2, 0.5, 0.123, 1e-3)
        },
        low=0.1,
        high=2,
    ),
    *cases_of(
        "ab",
        **{
            f"Maximum_{c}": lambda x, c=c: tf.maximum(x, c)
            for c in (0.0, 1.0, -1.0)
        },
    ),
]
_OF_NO_NUMBERS = [
    *_whole("ab:whole, ab:whole", "Maximum Minimum AddV2 Sub Mul"),
    *_whole("ab:whole, ab:whole", "BitwiseAnd BitwiseOr BitwiseXor"),
    *_whole("ab:whole, ab:whole", "LeftShift RightShift Pow", 3),
    *_whole("ab:whole, ab:whole", "FloorDiv FloorMod Mod Div"),
    *_whole("ab:whole, ab:whole", "TruncateDiv TruncateMod"),
    *_whole("ab:whole", "Invert PopulationCount Square Abs Neg"),
    *cases_of("ab:whole", "Relu", low=-3),
    *cases_of("ab:bool", "LogicalNot", broadcast=True),
    *cases_of("ab:bool, ab:bool", "LogicalAnd LogicalOr", broadcast=True),
    *_text("StringLower StringUpper StringStrip StringLength EncodeBase64"),
    *_text("StaticRegexReplace RegexReplace", {"pattern": "a", "rewrite": "b"}),
    *_text("StaticRegexFullMatch RegexFullMatch", {"pattern": "a.*"}),
    *_text("StringToHashBucketFast StringToHashBucket", {"num_buckets": 7}),
    *_text("StringToHashBucketStrong", {"num_buckets": 7, "key": [1, 2]}),
    *_text("UnicodeTranscode", _UTF),
    *_text("Substr", {"pos": 0, "len": 1}),
    *_text(DecodeBase64=lambda x: tf.io.decode_base64(_base64(x))),
    *cases_of(
        "ab:string, ab:string", StringJoin=lambda x, y: tf.strings.join([x, y])
    ),
    *_one("AsString"),
    *_one(StringToNumber=lambda x: tf.strings.to_number(_as_string(x))),
]
_GRADIENTS = [
    *_gradients("ReluGrad LeakyReluGrad Relu6Grad EluGrad SeluGrad"),
    *_gradients("SoftplusGrad SoftsignGrad"),
    *_gradients("TanhGrad SigmoidGrad SqrtGrad RsqrtGrad", 0.2, 0.9),
    *_gradients("ReciprocalGrad InvGrad", 0.2, 0.9),
]
_BIASES = [
    *cases_of("abc, c", "BiasAdd BiasAddV1"),
    *cases_of(
        "abc, b", BiasAdd_first=lambda x, b: tf.nn.bias_add(x, b, "NC...")
    ),
]
_CHOICES = [
    *cases_of("ab:bool, ab, ab", "SelectV2", broadcast=True),
    *cases_of("ab:bool, ab:whole, ab:whole", "SelectV2", broadcast=True),
    *cases_of("ab:bool, ab, ab", "Select"),
    *cases_of("a:bool, ab, ab", Select_rows={}),
]
_SAME = [
    *cases_of("ab", "CheckNumerics", {"message": "?"}),
    *cases_of("ab", "CheckNumericsV2", {"message": "?"}),
    *cases_of(
        "ab", "PlaceholderWithDefault EnsureShape", {"shape": lambda x: x.shape}
    ),
    *cases_of(
        "ab, ab",
        IdentityN=lambda x, y: tf.identity_n([x, y]),
        AddN=lambda x, y: tf.add_n([x, y, x]),
    ),
    *cases_of(
        "ab, ab",
        AccumulateNV2=lambda x, y: tf.raw_ops.AccumulateNV2(
            inputs=[x, y], shape=[2, 3]
        ),
    ),
    *cases_of("ab", "Bitcast", {"type": tf.int32}),
    *cases_of("ab:float64", Bitcast_halves={"type": tf.int32}),
    *(*_cast("", "float64"), *_cast("", "int32", -9, 9), *_cast("", "bool")),
    *(*_cast("whole", "float32"), *_cast("bool", "float32")),
    *(*_cast("whole", "int64", -5), *_cast("whole", "uint8", -200, 200)),
    *(*_cast("", "complex64"), *_cast("complex64", "float32")),
]
CASES = [
    *(*_NUMBERS, *_OF_NO_NUMBERS, *_GRADIENTS, *_BIASES, *_CHOICES, *_SAME)
]
