"""Sequences: dynamic programs, decoders, recurrent state, attention, experts, ragged."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from .base import CASES, Own, built, case, dense, floats, ints


def cross(y, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(y, "int32"), logits
    )


def lengths_mask(rows, length, seed=0):
    return np.arange(length)[None] < ints(length, rows, 1, seed=seed) + 1


@case
def ctc_with_greedy_decode_and_edit_distance():
    class Ctc(keras.Model):
        def __init__(self):
            super().__init__()
            self.rnn = keras.layers.Bidirectional(
                keras.layers.GRU(4, return_sequences=True)
            )
            self.head = keras.layers.Dense(5)
            self.distance = keras.metrics.Mean(name="distance")

        def call(self, x):
            return self.head(self.rnn(x))

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, **_
        ):
            frames = tf.fill(tf.shape(y_pred)[:1], tf.shape(y_pred)[1])
            labels = tf.math.count_nonzero(y, 1, dtype="int32")
            losses = tf.nn.ctc_loss(
                tf.cast(y, "int32"),
                y_pred,
                labels,
                frames,
                logits_time_major=False,
                blank_index=0,
            )
            decoded, _ = tf.nn.ctc_greedy_decoder(
                tf.transpose(y_pred, [1, 0, 2]), frames, blank_index=0
            )
            truth = tf.sparse.from_dense(tf.cast(y, "int64"))
            self.distance.update_state(
                tf.reshape(
                    tf.edit_distance(decoded[0], truth, normalize=False), [-1]
                )
            )
            return tf.reduce_mean(losses / tf.cast(labels, "float32"))

    y = ints(4, 20, 3) + 1
    y[ints(20, 8), 2] = 0
    model = Ctc()
    model(floats(2, 9, 4))
    model.compile("adam")
    return model, floats(20, 9, 4), y


@case
def crf_with_viterbi_accuracy():
    class Crf(Own):
        def create(self):
            self.transitions = self.add_weight(shape=(4, 4))

        def loss_of(self, x, y):
            potentials = self.net(x)
            mask = tf.cast(tf.reduce_any(x != 0, -1), "float32")
            t = tf.convert_to_tensor(self.transitions)
            hot = tf.one_hot(y, 4)
            score = tf.reduce_sum(potentials * hot * mask[..., None], [1, 2])
            pairs = tf.einsum("bti,ij,btj->bt", hot[:, :-1], t, hot[:, 1:])
            score += tf.reduce_sum(pairs * mask[:, 1:], 1)

            def step(alpha, parts):
                p, m = parts
                new = tf.reduce_logsumexp(alpha[:, :, None] + t[None], 1) + p
                return tf.where(m[:, None] > 0, new, alpha)

            alphas = tf.scan(
                step,
                (
                    tf.transpose(potentials[:, 1:], [1, 0, 2]),
                    tf.transpose(mask[:, 1:]),
                ),
                initializer=potentials[:, 0],
            )
            loss = tf.reduce_mean(tf.reduce_logsumexp(alphas[-1], 1) - score)

            def viterbi(carry, p):
                best, _ = carry
                both = best[:, :, None] + t[None]
                return tf.reduce_max(both, 1) + p, tf.argmax(both, 1, "int32")

            best, back = tf.scan(
                viterbi,
                tf.transpose(potentials[:, 1:], [1, 0, 2]),
                initializer=(
                    potentials[:, 0],
                    tf.zeros_like(potentials[:, 0], "int32"),
                ),
            )
            last = tf.argmax(best[-1], 1, "int32")
            path = tf.scan(
                lambda tag, b: tf.gather(b, tag, batch_dims=1),
                back,
                initializer=last,
                reverse=True,
            )
            path = tf.transpose(tf.concat([path, last[None]], 0))
            right = tf.cast(path == tf.cast(y, "int32"), "float32")
            return {
                "loss": loss,
                "viterbi": tf.reduce_sum(right * mask) / tf.reduce_sum(mask),
            }

    x = floats(20, 6, 5) * lengths_mask(20, 6)[..., None]
    net = keras.layers.Dense(4)
    return (
        built(Crf(net=net), floats(2, 6, 5)),
        x.astype("float32"),
        ints(4, 20, 6),
    )


@case
def seq2seq_with_attention_and_scheduled_sampling():
    class Seq(Own):
        def create(self):
            self.embed = keras.layers.Embedding(8, 5, mask_zero=True)
            self.encoder = keras.layers.GRU(
                6, return_sequences=True, return_state=True
            )
            self.cell = keras.layers.GRUCell(6)
            self.attend = keras.layers.AdditiveAttention()
            self.seed = keras.random.SeedGenerator(2)

        def call(self, x, training=False):
            return self.decode(x, x[:, :4], 0.0)

        def decode(self, x, y, sampling):
            values, state = self.encoder(self.embed(x))
            mask = x != 0
            length = tf.shape(y)[1]
            logits = tf.TensorArray("float32", length)
            token = tf.ones(tf.shape(x)[:1], y.dtype)

            def body(i, token, state, logits):
                context = self.attend(
                    [state[:, None], values], mask=[None, mask]
                )[:, 0]
                out, [state] = self.cell(
                    tf.concat([self.embed(token), context], -1), [state]
                )
                scores = self.net(out)
                draw = keras.random.uniform(tf.shape(token), seed=self.seed)
                own = tf.cast(tf.argmax(scores, -1), y.dtype)
                token = tf.where(draw < sampling, own, y[:, i])
                return i + 1, token, state, logits.write(i, scores)

            logits = tf.while_loop(
                lambda i, *_: i < length, body, (0, token, state, logits)
            )[-1]
            return tf.transpose(logits.stack(), [1, 0, 2])

        def loss_of(self, x, y):
            sampling = tf.minimum(
                0.5, tf.cast(self.optimizer.iterations, "float32") * 0.2
            )
            logits = self.decode(x, y, sampling)
            mask = tf.cast(y != 0, "float32")
            return tf.reduce_sum(cross(y, logits) * mask) / tf.reduce_sum(mask)

    x, y = (
        (ints(7, 20, 5) + 1) * lengths_mask(20, 5),
        (ints(7, 20, 4) + 1) * lengths_mask(20, 4, 1),
    )
    model = Seq(net=keras.layers.Dense(8))
    model.decode(tf.constant(x[:2]), tf.constant(y[:2]), 0.0)
    model.compile(keras.optimizers.Adam(1e-2, clipvalue=0.1))
    return model, x, y


@case
def beam_search_that_stops_in_test_step():
    class Beam(Own):
        def create(self):
            self.found = keras.metrics.Mean(name="length")

        def loss_of(self, x, y):
            return tf.reduce_mean(cross(y, self.net(x)))

        def test_step(self, data):
            x, y = data
            table = tf.nn.log_softmax(
                tf.reshape(
                    self.net.layers[0].embeddings @ tf.ones((5, 6)), [6, 6]
                )
                + tf.eye(6)[::-1]
            )
            count = tf.shape(x)[0]
            beams = tf.tile(x[:, :1, None], [1, 2, 1])
            scores = tf.tile(tf.constant([[0.0, -9.0]]), [count, 1])

            def go(i, beams, scores, ended):
                return (i < 6) & ~tf.reduce_all(ended)

            def body(i, beams, scores, ended):
                following = tf.gather(table, beams[:, :, -1])
                total = tf.reshape(scores[..., None] + following, [count, 12])
                scores, places = tf.math.top_k(total, 2)
                parents, tokens = places // 6, places % 6
                beams = tf.gather(beams, parents, batch_dims=1)
                beams = tf.concat(
                    [beams, tf.cast(tokens[..., None], beams.dtype)], 2
                )
                return i + 1, beams, scores, ended | (tokens[:, 0] == 0)

            i, beams, scores, ended = tf.while_loop(
                go,
                body,
                (0, beams, scores, tf.zeros([count], "bool")),
                shape_invariants=(
                    tf.TensorShape([]),
                    tf.TensorShape([None, 2, None]),
                    tf.TensorShape([None, 2]),
                    tf.TensorShape([None]),
                ),
            )
            self.found.update_state(tf.repeat(i, count))
            return {
                "length": self.found.result(),
                "score": tf.reduce_mean(scores),
                "sum": tf.reduce_sum(beams),
            }

    net = keras.Sequential(
        [
            keras.layers.Embedding(6, 5),
            keras.layers.LSTM(4, return_sequences=True),
            keras.layers.Dense(6),
        ]
    )
    return built(Beam(net=net), ints(6, 2, 4)), ints(6, 20, 4), ints(6, 20, 4)


@case
def gpt_with_tied_embeddings_and_padding():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(
                2, 3, dropout=0.1, seed=4
            )
            self.norms = [
                keras.layers.LayerNormalization(),
                keras.layers.LayerNormalization(rms_scaling=False),
            ]
            self.mlp = dense(12, 6, act="gelu")

        def call(self, x, mask=None, training=False):
            h = self.norms[0](x)
            x = x + self.attention(
                h,
                h,
                use_causal_mask=True,
                training=training,
                attention_mask=None if mask is None else mask[:, None, :],
            )
            return x + self.mlp(self.norms[1](x))

    class Gpt(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = keras.layers.Embedding(9, 6)
            self.place = keras.layers.Embedding(7, 6)
            self.blocks = [Block(), Block()]

        def call(self, ids, training=False):
            mask = ids != 0
            x = self.embed(ids) + self.place(ops.arange(ops.shape(ids)[1]))
            for b in self.blocks:
                x = b(x, mask=mask, training=training)
            return ops.matmul(x, ops.transpose(self.embed.embeddings))

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, **_
        ):
            mask = ops.cast(y != 0, "float32")
            losses = keras.losses.sparse_categorical_crossentropy(
                y, y_pred, from_logits=True
            )
            z = ops.logsumexp(y_pred, axis=-1)
            return ops.sum((losses + 1e-2 * z**2) * mask) / ops.maximum(
                ops.sum(mask), 1
            )

    ids = (ints(8, 20, 7) + 1) * lengths_mask(20, 7)
    model = Gpt()
    model(ids[:2])
    model.compile(
        keras.optimizers.AdamW(
            1e-2, global_clipnorm=1.0, gradient_accumulation_steps=2
        ),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model, ids, np.concatenate([ids[:, 1:], np.zeros((20, 1), int)], 1)


@case(batch=5)
def stateful_rnn_across_batches():
    x = keras.Input((4, 3), batch_size=5)
    h = keras.layers.LSTM(
        4,
        stateful=True,
        return_sequences=True,
        recurrent_dropout=0.2,
        dropout=0.1,
        seed=3,
    )(x)
    h = keras.layers.GRU(3, stateful=True)(h)
    model = keras.Model(x, keras.layers.Dense(1)(h))
    model.compile("adam", "mse")
    return model, floats(20, 4, 3), floats(20, 1)


@case
def cell_of_my_own_with_norm_and_zoneout():
    class Cell(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.state_size = [4, 4]
            self.output_size = 4
            self.inner = keras.layers.Dense(16, use_bias=False)
            self.norm = keras.layers.LayerNormalization()
            self.seed = keras.random.SeedGenerator(4)

        def build(self, shape):
            self.inner.build((None, shape[-1] + 4))
            self.norm.build((None, 16))

        def call(self, x, states, training=False):
            h, c = states
            i, f, g, o = ops.split(
                self.norm(self.inner(ops.concatenate([x, h], -1))), 4, -1
            )
            new_c = ops.sigmoid(f + 1) * c + ops.sigmoid(i) * ops.tanh(g)
            new_h = ops.sigmoid(o) * ops.tanh(new_c)
            if training:
                keep = keras.random.uniform(ops.shape(h), seed=self.seed) < 0.2
                new_h = ops.where(keep, h, new_h)
            return new_h, [new_h, new_c]

    x = keras.Input((5, 3))
    h = keras.layers.Masking()(x)
    h = keras.layers.RNN(Cell(), return_sequences=True)(h)
    h = keras.layers.RNN([Cell(), Cell()], go_backwards=True)(h)
    model = keras.Model(x, keras.layers.Dense(2)(h))
    model.compile("adam", "mae")
    data = floats(20, 5, 3) * lengths_mask(20, 5)[..., None]
    return model, data.astype("float32"), floats(20, 2)


@case
def switch_experts_with_capacity_over_the_batch():
    class Experts(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.router = keras.layers.Dense(3)
            self.seed = keras.random.SeedGenerator(3)

        def build(self, shape):
            self.up = self.add_weight(shape=(3, shape[-1], 8))
            self.down = self.add_weight(shape=(3, 8, shape[-1]))
            self.router.build(shape)

        def call(self, x, training=False):
            shape = tf.shape(x)
            tokens = tf.reshape(x, [-1, x.shape[-1]])
            count = tf.shape(tokens)[0]
            noisy = tokens
            if training:
                noisy *= keras.random.uniform(
                    tf.shape(tokens), 0.9, 1.1, seed=self.seed
                )
            p = tf.nn.softmax(self.router(noisy))
            gate, index = tf.reduce_max(p, 1), tf.argmax(p, 1)
            hot = tf.one_hot(index, 3)
            self.add_loss(
                0.1
                * 3
                * tf.reduce_sum(tf.reduce_mean(hot, 0) * tf.reduce_mean(p, 0))
            )
            capacity = tf.cast(
                tf.math.ceil(tf.cast(count, "float32") / 3 * 1.0), "int32"
            )
            position = tf.cast(
                tf.reduce_sum(tf.cumsum(hot, exclusive=True) * hot, 1), "int32"
            )
            keep = tf.cast(position < capacity, "float32")
            dispatch = (
                hot[..., None]
                * tf.one_hot(position, capacity)[:, None]
                * keep[:, None, None]
            )
            inputs = tf.einsum("tec,td->ecd", dispatch, tokens)
            h = tf.nn.gelu(
                tf.einsum("ecd,edh->ech", inputs, tf.convert_to_tensor(self.up))
            )
            out = tf.einsum("ech,ehd->ecd", h, tf.convert_to_tensor(self.down))
            combined = tf.einsum(
                "tec,ecd->td", dispatch * gate[:, None, None], out
            )
            return x + tf.reshape(combined, shape)

    x = keras.Input((4, 5))
    h = Experts()(keras.layers.LayerNormalization()(x))
    h = Experts()(h)
    model = keras.Model(
        x, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(h))
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model, floats(20, 4, 5), floats(20, 2)


@case
def experts_that_choose_their_tokens():
    class Choice(keras.layers.Layer):
        def build(self, shape):
            self.route = self.add_weight(shape=(shape[-1], 2))
            self.up = self.add_weight(shape=(2, shape[-1], shape[-1]))

        def call(self, x):
            p = tf.nn.softmax(tf.matmul(x, tf.convert_to_tensor(self.route)))
            k = tf.maximum(tf.shape(x)[0] // 2, 1)
            gate, places = tf.math.top_k(tf.transpose(p), k)
            chosen = tf.gather(x, places)
            out = (
                tf.einsum("ekd,edf->ekf", chosen, tf.convert_to_tensor(self.up))
                * gate[..., None]
            )
            return x + tf.scatter_nd(
                tf.reshape(places, [-1, 1]),
                tf.reshape(out, [-1, x.shape[-1]]),
                tf.shape(x),
            )

    x = keras.Input((6,))
    model = keras.Model(
        x, keras.layers.Dense(1)(Choice()(keras.layers.Dense(5, "relu")(x)))
    )
    model.compile("adam", "mse")
    return model, floats(20, 6), floats(20, 1)


@case(evaluate=False)
def word2vec_with_negatives_and_lazy_updates():
    class Word2Vec(Own):
        def create(self):
            self.table = self.add_weight(shape=(12, 4))
            self.out = self.add_weight(shape=(12, 4))
            self.seed = keras.random.SeedGenerator(3)

        def call(self, x):
            return tf.gather(self.table, x)

        def train_step(self, data):
            x, y = data
            weights = [self.table, self.out]
            negatives = keras.random.randint(
                (tf.shape(x)[0], 3), 0, 12, seed=self.seed
            )
            with tf.GradientTape() as tape:
                v = tf.nn.embedding_lookup(self.table.value, x)
                pos = tf.nn.embedding_lookup(self.out.value, y)
                neg = tf.nn.embedding_lookup(self.out.value, negatives)
                loss = tf.reduce_sum(
                    tf.nn.softplus(-tf.reduce_sum(v * pos, -1))
                ) + tf.reduce_sum(
                    tf.nn.softplus(tf.einsum("bd,bnd->bn", v, neg))
                )
            gradients = tape.gradient(loss, weights)
            for g, w in zip(gradients, weights, strict=True):
                # Lazy: only touched rows move, each by the mean of its gradients.
                g = (
                    tf.IndexedSlices(g.values, g.indices)
                    if isinstance(g, tf.IndexedSlices)
                    else g
                )
                rows, place = tf.unique(g.indices)
                mean = tf.math.unsorted_segment_mean(
                    g.values, place, tf.size(rows)
                )
                w.assign(
                    tf.tensor_scatter_nd_sub(w.value, rows[:, None], 0.1 * mean)
                )
            self.optimizer.iterations.assign_add(1)
            return {"loss": loss}

    model = Word2Vec()
    model(ints(12, 2))
    model.compile("sgd")
    return model, ints(12, 20), ints(12, 20, seed=1)


@case
def sampled_softmax_with_shared_candidates():
    class Sampled(Own):
        def create(self):
            self.w = self.add_weight(shape=(12, 4))
            self.b = self.add_weight(shape=(12,), initializer="zeros")
            self.seed = keras.random.SeedGenerator(3)

        def loss_of(self, x, y):
            z = self.net(x)
            drawn = tf.cast(
                keras.random.randint((5,), 0, 12, seed=self.seed), "int64"
            )
            expected = (
                tf.ones_like(y[:, None], "float32") * 0.4,
                tf.ones([5]) * 0.4,
            )
            losses = tf.nn.sampled_softmax_loss(
                tf.convert_to_tensor(self.w),
                tf.convert_to_tensor(self.b),
                y[:, None],
                z,
                5,
                12,
                sampled_values=(drawn, *expected),
            )
            return tf.reduce_mean(losses)

    return (
        built(Sampled(net=dense(8, 4)), floats(2, 6)),
        floats(20, 6),
        ints(12, 20),
    )


@case
def bert_whose_masked_places_are_gathered():
    class Bert(Own):
        def create(self):
            self.seed = keras.random.SeedGenerator(3)
            self.embed = keras.layers.Embedding(10, 6)
            self.encode = keras.layers.MultiHeadAttention(2, 3)
            self.head = keras.layers.Dense(10)
            self.nsp = keras.layers.Dense(2)

        def call(self, x):
            e = self.embed(x)
            return e + self.encode(e, e, attention_mask=(x != 0)[:, None])

        def loss_of(self, x, y):
            draw = keras.random.uniform(tf.shape(x), seed=self.seed)
            masked = (draw < 0.3) & (x != 0)
            h = self(tf.where(masked, tf.constant(1, x.dtype), x))
            places = tf.where(masked)
            logits = self.head(tf.gather_nd(h, places))
            losses = cross(tf.gather_nd(x, places), logits)
            mlm = tf.math.divide_no_nan(
                tf.reduce_sum(losses), tf.cast(tf.size(losses), "float32")
            )
            right = tf.reduce_sum(
                tf.cast(
                    tf.argmax(logits, 1) == tf.gather_nd(x, places), "float32"
                )
            )
            return {
                "loss": mlm + tf.reduce_mean(cross(y, self.nsp(h[:, 0]))),
                "right": right,
            }

    x = (ints(8, 20, 6) + 2) * lengths_mask(20, 6)
    model = Bert()
    model.loss_of(tf.constant(x), ints(2, 20))
    model.compile(keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9))
    return model, x, ints(2, 20)


@case
def linear_recurrence_by_scans_over_time():
    class Lru(keras.layers.Layer):
        def build(self, shape):
            self.decay = self.add_weight(
                shape=(shape[-1],),
                initializer=keras.initializers.RandomUniform(0, 1, seed=3),
            )
            self.inner = self.add_weight(shape=(shape[-1], shape[-1]))

        def call(self, x):
            a = ops.sigmoid(self.decay)
            b = ops.transpose(ops.matmul(x, self.inner), (1, 0, 2))

            def step(carry, row):
                new = a * carry + row
                return new, ops.tanh(new) * carry

            last, rows = ops.scan(step, ops.zeros_like(b[0]), b)
            return last + ops.mean(rows, axis=0)

    x = keras.Input((6, 3))
    model = keras.Model(
        x, keras.layers.Dense(1)(Lru()(keras.layers.Dense(4)(x)))
    )
    model.compile("adam", "log_cosh")
    return model, floats(20, 6, 3), floats(20, 1)


@case(batch=10)
def transformer_xl_with_a_memory_of_the_last_batch():
    class Memory(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(1, 4)

        def build(self, shape):
            self.memory = self.add_weight(
                shape=(10, 3, shape[-1]), initializer="zeros", trainable=False
            )
            self.attention.build(shape, shape)

        def call(self, x):
            both = ops.concatenate([self.memory, x], axis=1)
            out = self.attention(x, both)
            self.memory.assign(ops.stop_gradient(x[:, -3:]))
            return x + out

    x = keras.Input((5, 4), batch_size=10)
    model = keras.Model(
        x, keras.layers.Dense(1)(Memory()(keras.layers.Dense(4)(x)))
    )
    model.compile("adam", "mse")
    return model, floats(20, 5, 4), floats(20, 5, 1)


@case
def hidden_markov_model_by_keras_scan():
    class Hmm(Own):
        def create(self):
            self.start = self.add_weight(shape=(3,))
            self.move = self.add_weight(shape=(3, 3))
            self.emit = self.add_weight(shape=(3, 5))

        def call(self, x):
            move = ops.log_softmax(self.move, axis=1)
            emit = ops.transpose(ops.log_softmax(self.emit, axis=1))
            steps = ops.transpose(ops.take(emit, x, axis=0), (1, 0, 2))

            def step(alpha, e):
                new = ops.logsumexp(alpha[:, :, None] + move[None], axis=1) + e
                return new, new

            last, _ = ops.scan(
                step, ops.log_softmax(self.start)[None] + steps[0], steps[1:]
            )
            return ops.logsumexp(last, axis=1)

        def loss_of(self, x, y):
            return -ops.mean(self(x))

    model = Hmm()
    return built(model, ints(5, 2, 6)), ints(5, 20, 6), None


@case
def soft_dtw_by_keras_loops():
    class Dtw(Own):
        def loss_of(self, x, y):
            out = self.net(x)
            d = (out - ops.transpose(y, (0, 2, 1))) ** 2
            count = ops.shape(d)[0]
            row = ops.concatenate(
                [ops.zeros((count, 1)), ops.full((count, 4), 1e3)], 1
            )

            def line(i, row):
                cells = ops.full((count, 1), 1e3)

                def cell(j, state):
                    cells, row = state
                    best = -0.1 * ops.logsumexp(
                        -ops.stack([row[:, j], row[:, j + 1], cells[:, -1]], -1)
                        / 0.1,
                        axis=-1,
                    )
                    return ops.concatenate(
                        [cells, (best + d[:, i, j])[:, None]], 1
                    ), row

                for j in range(4):
                    cells, row = cell(j, (cells, row))
                return cells

            row = ops.fori_loop(0, 4, line, row)
            return ops.mean(row[:, -1])

    return (
        built(Dtw(net=dense(8, 1)), floats(2, 4, 3)),
        floats(20, 4, 3),
        floats(20, 4, 1),
    )


@case
def pointer_network_that_visits_each_place_once():
    class Pointer(Own):
        def create(self):
            self.query = keras.layers.GRUCell(5)

        def call(self, x):
            keys = self.net(x)
            count, places = tf.shape(x)[0], tf.shape(x)[1]

            def body(i, h, mask, log, tour):
                scores = tf.einsum("bd,bpd->bp", h, keys) - 1e9 * mask
                p = tf.nn.log_softmax(scores)
                at = tf.argmax(p, 1, "int32")
                hot = tf.one_hot(at, places)
                h, _ = self.query(tf.gather(x, at, batch_dims=1), [h])
                log += tf.reduce_sum(hot * tf.maximum(p, -50.0), 1)
                return i + 1, h, mask + hot, log, tour.write(i, at)

            _, _, _, log, tour = tf.while_loop(
                lambda i, *_: i < places,
                body,
                (
                    0,
                    tf.reduce_mean(keys, 1),
                    tf.zeros([count, places]),
                    tf.zeros([count]),
                    tf.TensorArray("int32", places),
                ),
            )
            return tf.transpose(tour.stack()), log

        def loss_of(self, x, y):
            tour, log = self(x)
            way = tf.gather(x, tour, batch_dims=1)
            length = tf.reduce_sum(
                tf.norm(way - tf.roll(way, 1, 1) + 1e-6, axis=-1), 1
            )
            return {
                "loss": tf.reduce_mean((length - tf.reduce_mean(length)) * log),
                "length": tf.reduce_mean(length),
            }

    return (
        built(Pointer(net=dense(8, 5)), floats(2, 5, 2)),
        floats(20, 5, 2),
        None,
    )


@case
def spiking_neurons_with_surrogate_gradients():
    @tf.custom_gradient
    def spike(v):
        return tf.cast(
            v > 0, "float32"
        ), lambda g: g / (1 + 10 * tf.abs(v)) ** 2

    class Lif(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1], 6))
            self.threshold = self.add_weight(
                shape=(6,), initializer="ones", trainable=False
            )

        def call(self, x, training=False):
            current = tf.einsum("btd,dh->tbh", x, tf.convert_to_tensor(self.w))

            def step(state, i):
                v, _ = state
                v = 0.8 * v + i
                s = spike(v - self.threshold)
                return v * (1 - s), s

            zeros = tf.zeros_like(current[0])
            _, spikes = tf.scan(step, current, initializer=(zeros, zeros))
            rate = tf.reduce_mean(spikes, [0, 1])
            if training:
                # Homeostasis: a neuron that spikes too often gets a higher threshold.
                self.threshold.assign_add(0.1 * (rate - 0.2))
            self.add_loss(0.1 * tf.reduce_sum((rate - 0.2) ** 2))
            return tf.reduce_mean(spikes, 0)

    x = keras.Input((5, 4))
    model = keras.Model(x, keras.layers.Dense(3)(Lif()(x)))
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(True),
        metrics=["accuracy"],
    )
    return model, floats(20, 5, 4) * 2, ints(3, 20)


@case
def neural_ode_with_steps_of_the_whole_batch():
    """The step size follows the largest error in the batch."""

    class Ode(Own):
        def call(self, x):
            f = self.field

            def body(t, z, h, n):
                h = tf.minimum(h, 1.0 - t)
                k1 = f(z)
                k2 = f(z + h * k1)
                euler, heun = z + h * k1, z + h * (k1 + k2) / 2
                error = tf.reduce_max(tf.abs(euler - heun))
                ok = error < 0.1
                new_h = h * tf.clip_by_value(
                    0.9 * tf.sqrt(0.1 / (tf.stop_gradient(error) + 1e-6)),
                    0.3,
                    2.0,
                )
                return (
                    tf.where(ok, t + h, t),
                    tf.where(ok, heun, z),
                    new_h,
                    n + 1,
                )

            _, z, _, n = tf.while_loop(
                lambda t, z, h, n: (t < 0.999) & (n < 12),
                body,
                (0.0, x, 0.4, 0),
            )
            return self.net(z), n

        def loss_of(self, x, y):
            out, n = self(x)
            return {"loss": tf.reduce_mean(cross(y, out)), "steps": n}

        def test_step(self, data):
            return self.loss_of(*data)

        def predict_step(self, data):
            return self(data[0] if isinstance(data, tuple) else data)[0]

    model = Ode(net=keras.layers.Dense(3), field=dense(8, 4))
    model.field(floats(2, 4))
    return built(model, floats(2, 4)), floats(20, 4), ints(3, 20)


@case
def equilibrium_model_with_implicit_gradients():
    class Deq(Own):
        def create(self):
            self.w = self.add_weight(
                shape=(5, 5),
                initializer=keras.initializers.RandomNormal(0.2, seed=3),
            )

        def call(self, x):
            u = self.net(x)
            w = tf.convert_to_tensor(self.w)

            def solve(step, start):
                return tf.while_loop(
                    lambda i, z, e: (i < 30) & (e > 1e-4),
                    lambda i, z, e: (
                        i + 1,
                        step(z),
                        tf.norm(step(z) - z) / (tf.norm(z) + 1e-6),
                    ),
                    (0, start, tf.constant(1.0)),
                )[1]

            @tf.custom_gradient
            def fixed(w, u):
                z = solve(
                    lambda z: tf.tanh(tf.matmul(z, w) + u), tf.zeros_like(u)
                )

                def grad(g):
                    d = 1 - tf.tanh(tf.matmul(z, w) + u) ** 2
                    v = solve(
                        lambda v: g + tf.matmul(v * d, w, transpose_b=True), g
                    )
                    return tf.matmul(z, v * d, transpose_a=True), v * d

                return z, grad

            return self.head(fixed(w, u))

        def loss_of(self, x, y):
            return tf.reduce_mean((self(x) - y) ** 2)

    return (
        built(Deq(net=dense(8, 5), head=keras.layers.Dense(1)), floats(2, 4)),
        floats(20, 4),
        floats(20, 1),
    )


@case
def hopfield_layer_with_written_patterns():
    class Hopfield(keras.layers.Layer):
        def build(self, shape):
            self.patterns = self.add_weight(
                shape=(8, shape[-1]),
                trainable=False,
                initializer=keras.initializers.RandomNormal(1, seed=3),
            )
            self.age = self.add_weight(
                shape=(8,), trainable=False, initializer="zeros"
            )

        def call(self, x, training=False):
            p = ops.convert_to_tensor(self.patterns)

            def body(i, z):
                return i + 1, ops.matmul(
                    ops.softmax(2 * ops.matmul(z, ops.transpose(p))), p
                )

            _, z = ops.while_loop(lambda i, z: i < 3, body, (0, x))
            if training:
                # The pattern used least is overwritten by the example least like any.
                use = ops.sum(
                    ops.softmax(ops.matmul(x, ops.transpose(p))), axis=0
                )
                self.age.assign(0.9 * self.age + use)
                fit = ops.max(ops.matmul(x, ops.transpose(p)), axis=1)
                odd = ops.take(ops.stop_gradient(x), ops.argmin(fit), axis=0)
                self.patterns.assign(
                    ops.scatter_update(
                        p, ops.reshape(ops.argmin(self.age), (1, 1)), odd[None]
                    )
                )
            return ops.concatenate([x, z], -1)

    x = keras.Input((6,))
    h = Hopfield()(keras.layers.Dense(4, "tanh")(x))
    model = keras.Model(x, keras.layers.Dense(1, "sigmoid")(h))
    model.compile(
        "adam",
        "binary_crossentropy",
        metrics=[
            keras.metrics.AUC(num_thresholds=20),
            keras.metrics.F1Score(threshold=0.5),
        ],
    )
    return model, floats(20, 6), ints(2, 20, 1).astype("float32")


@case
def capsules_with_routing():
    class Capsules(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[1], 3, shape[2], 4))

        def call(self, x):
            u = tf.einsum("bid,ijdk->bijk", x, tf.convert_to_tensor(self.w))
            b = tf.zeros(tf.shape(u)[:3])
            for i in range(3):
                c = tf.nn.softmax(b, 2)
                s = tf.reduce_sum(
                    c[..., None] * (u if i == 2 else tf.stop_gradient(u)), 1
                )
                n = tf.reduce_sum(s**2, -1, keepdims=True)
                v = n / (1 + n) * s / tf.sqrt(n + 1e-7)
                b += tf.einsum("bijk,bjk->bij", u, v)
            return tf.norm(v + 1e-6, axis=-1)

    def margin(y, p):
        t = tf.one_hot(tf.cast(tf.reshape(y, [-1]), "int32"), 3)
        return tf.reduce_sum(
            t * tf.nn.relu(0.9 - p) ** 2
            + 0.5 * (1 - t) * tf.nn.relu(p - 0.1) ** 2,
            -1,
        )

    x = keras.Input((4, 4, 1))
    h = keras.layers.Conv2D(4, 2)(x)
    h = keras.layers.Reshape((9, 4))(h)
    model = keras.Model(x, Capsules()(h))
    model.compile("adam", margin, metrics=["accuracy"])
    return model, floats(20, 4, 4, 1), ints(3, 20)


@case(predict=False)
def ragged_documents_with_segments():
    class Ragged(Own):
        def create(self):
            self.embed = self.add_weight(shape=(12, 4))

        def call(self, x):
            values = tf.nn.embedding_lookup(self.embed.value, x.values)
            scores = self.net(values)[:, 0]
            rows = x.value_rowids()
            count = x.nrows()
            top = tf.gather(tf.math.segment_max(scores, rows), rows)
            e = tf.exp(scores - tf.stop_gradient(top))
            attention = e / tf.gather(tf.math.segment_sum(e, rows), rows)
            pooled = tf.math.unsorted_segment_sum(
                values * attention[:, None], rows, count
            )
            return self.head(
                tf.concat(
                    [pooled, tf.cast(x.row_lengths(), "float32")[:, None]], 1
                )
            )

        def loss_of(self, x, y):
            return tf.reduce_mean(cross(y, self(x)))

    lengths = ints(5, 20) + 1
    x = tf.RaggedTensor.from_row_lengths(ints(12, lengths.sum()), lengths)
    model = Ragged(net=dense(6, 1), head=keras.layers.Dense(2))
    model.loss_of(x, ints(2, 20))
    model.compile("adam")
    return (
        model,
        tf.data.Dataset.from_tensor_slices((x, ints(2, 20))).batch(13),
        None,
    )


@case
def sparse_features_and_a_factorisation_machine():
    class Fm(Own):
        def create(self):
            self.w = self.add_weight(shape=(9, 1))
            self.v = self.add_weight(shape=(9, 3))

        def call(self, x):
            linear = tf.sparse.sparse_dense_matmul(
                x, tf.convert_to_tensor(self.w)
            )
            v = tf.convert_to_tensor(self.v)
            both = tf.sparse.sparse_dense_matmul(x, v) ** 2
            each = tf.sparse.sparse_dense_matmul(
                tf.sparse.map_values(tf.square, x), v**2
            )
            return linear + 0.5 * tf.reduce_sum(both - each, 1, keepdims=True)

        def loss_of(self, x, y):
            return tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(
                    labels=y, logits=self(x)
                )
            )

    dense_x = floats(20, 9) * (floats(20, 9, seed=1) > 0.5)
    x = tf.sparse.from_dense(dense_x.astype("float32"))
    y = (floats(20, 1, seed=2) > 0).astype("float32")
    model = Fm()
    model(tf.sparse.from_dense(np.eye(9, dtype="float32")[:2]))
    model.compile(keras.optimizers.Ftrl(0.1))
    return model, tf.data.Dataset.from_tensor_slices((x, y)).batch(13), None


@case
def strings_hashed_crossed_and_looked_up():
    name, age = (
        keras.Input((1,), dtype="string", name="name"),
        keras.Input((1,), name="age"),
    )
    ids = keras.layers.StringLookup(
        vocabulary=["ann", "bob", "cem"], num_oov_indices=2
    )(name)
    hashed = keras.layers.Hashing(5, salt=3)(name)
    bucket = keras.layers.Discretization([-1.0, 0.0, 1.0])(age)
    crossed = keras.layers.HashedCrossing(7)([hashed, bucket])
    parts = [
        keras.layers.Flatten()(keras.layers.Embedding(8, 3)(v))
        for v in (ids, hashed, crossed)
    ]
    parts.append(keras.layers.CategoryEncoding(4, "multi_hot")(bucket))
    h = keras.layers.Concatenate()([*parts, age])
    model = keras.Model(
        {"name": name, "age": age}, keras.layers.Dense(1)(dense(6, 4)(h))
    )
    model.compile(
        "adam",
        "mse",
        metrics=[keras.metrics.R2Score(), keras.metrics.PearsonCorrelation()],
    )
    words = np.array(["ann", "bob", "cem", "dan", "eve"])[ints(5, 20, 1)]
    x = {"name": tf.constant(words), "age": floats(20, 1)}
    return (
        model,
        tf.data.Dataset.from_tensor_slices((x, floats(20, 1, seed=3))).batch(
            13
        ),
        None,
    )


@case
def depth_by_a_halting_loop():
    """Adaptive computation time: the loop ends when all examples have halted."""

    class Act(Own):
        def call(self, x):
            def body(n, z, halted, out, ponder):
                z = self.cell(tf.concat([z, x], -1))
                p = tf.sigmoid(self.halt(z))
                p = tf.where(halted + p > 0.95, 1 - halted, p)
                p = tf.where(halted >= 0.95, tf.zeros_like(p), p)
                return (
                    n + 1,
                    z,
                    halted + p,
                    out + p * z,
                    ponder + tf.cast(halted < 0.95, "float32"),
                )

            zeros = tf.zeros_like(x[:, :1])
            n, z, halted, out, ponder = tf.while_loop(
                lambda n, z, halted, *_: (n < 8) & tf.reduce_any(halted < 0.95),
                body,
                (0, tf.zeros_like(x), zeros, tf.zeros_like(x), zeros),
            )
            return self.net(out), ponder

        def loss_of(self, x, y):
            out, ponder = self(x)
            return {
                "loss": tf.reduce_mean((out - y) ** 2),
                "ponder": tf.reduce_mean(ponder),
            }

    model = Act(
        net=keras.layers.Dense(1), cell=dense(8, 4), halt=keras.layers.Dense(1)
    )
    return built(model, floats(2, 4)), floats(20, 4), floats(20, 1)
