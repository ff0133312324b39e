"""What a layer does to a prompt."""

from ._attention import AbstractAttention as AbstractAttention
from ._attention import AbstractLayer as AbstractLayer
from ._attention import Jacobian as Jacobian
from ._attention import LinearAttention as LinearAttention
from ._attention import SoftmaxAttention as SoftmaxAttention
from ._heads import Head as Head
from ._heads import HeadJacobian as HeadJacobian
from ._heads import Kind as Kind
from ._heads import Merged as Merged
from ._heads import MultiHead as MultiHead
from ._heads import MultiHeadJacobian as MultiHeadJacobian
from ._heads import attention_of as attention_of
from ._heads import chain_rule as chain_rule
from ._heads import merged_form as merged_form
from ._heads import softmax_form as softmax_form
from ._linearity import nonlinearity as nonlinearity
from ._linearity import relative_nonlinearity as relative_nonlinearity
from ._pushforward import depth as depth
from ._pushforward import particles as particles
from ._pushforward import pushforward as pushforward
from ._query import with_query as with_query
from ._stderr import output_stderr as output_stderr
from ._weights import WeightMoments as WeightMoments
from ._weights import weight_expansion as weight_expansion
