"""Corrupt good documents in seven ways, to measure the recall of a scan.

All kinds occur in real corpora: the text of a document is wrongly encoded, dumped or decoded, or its tokens are
replaced. The other languages are babble: letters drawn by the statistics of opening lines of works in the public
domain, so that no two documents share their text. To a tokenizer they look like the language, without meaning.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megastable.data.tokenizer import Tokenizer

Ids = npt.NDArray[np.int64]
Random = np.random.Generator

# Correct labels (names in kinds.KINDS) for each planted kind.
PLANTED: dict[str, tuple[str, ...]] = {
    "random": ("random tokens",),
    "shuffled": ("shuffled text",),
    "loop": ("repetition",),
    "encoding": ("wrong encoding",),
    "binary": ("binary data",),
    "base64": ("encoded data",),
    "language": ("another language or register",),
}
NOISY = 0.02  # share of other tokens in irregular loops
LONGEST_PERIOD = 64


def corrupt(kind: str, ids: npt.NDArray[np.integer], tokenizer: Tokenizer, random: Random) -> Ids:
    """A document [n >= 1] without its end-of-document token, corrupted as `kind` of PLANTED: int64 [m], m <= n.

    Deterministic by the state of `random`. m is about n unless the corrupted text is shorter. Raises ValueError for an
    unknown kind.
    """
    given: Ids = np.asarray(ids, dtype=np.int64)
    if kind in BY_TOKENS:
        return BY_TOKENS[kind](given, tokenizer, random)
    if kind not in BY_TEXT:
        raise ValueError(f"no corruption {kind!r}: one of {', '.join(PLANTED)}")
    text = tokenizer.decode(given.tolist())
    spoiled = BY_TEXT[kind](text, random)
    return np.asarray(tokenizer.encode(spoiled)[: len(given)] or given[:1].tolist(), dtype=np.int64)


def _random(ids: Ids, tokenizer: Tokenizer, random: Random) -> Ids:
    drawn = random.integers(0, tokenizer.vocab_size - 1, len(ids))
    return drawn + (drawn >= tokenizer.eod)


def _shuffled(ids: Ids, tokenizer: Tokenizer, random: Random) -> Ids:
    return random.permutation(ids)


def _loop(ids: Ids, tokenizer: Tokenizer, random: Random) -> Ids:
    """A few of its tokens repeated; one loop in three is not quite regular."""
    period = min(int(np.exp(random.uniform(0, np.log(LONGEST_PERIOD + 1)))), len(ids))
    first = int(random.integers(0, len(ids) - period + 1))
    looped = np.resize(ids[first : first + period], len(ids))
    if random.random() < 1 / 3:
        looped = np.where(random.random(len(ids)) < NOISY, random.permutation(ids), looped)
    return looped


def _encoding(text: str, random: Random) -> str:
    """UTF-16 read as Latin-1 or in the wrong byte order, EBCDIC read as Latin-1, or a text in another language whose
    UTF-8 was read as Windows-1252 or Latin-1 (English and source code, nearly all ASCII, would not change)."""
    way = int(random.integers(4))
    if way == 0:
        return text.encode("utf-16-le", "surrogatepass").decode("latin-1")
    if way == 1:
        return text.encode("utf-16-be", "surrogatepass").decode("utf-16-le", "replace")
    if way == 2:
        return text.encode("cp500", "replace").decode("latin-1")
    utf8 = _language(text, random).encode()
    return utf8.decode("cp1252", "replace") if random.random() < 0.5 else utf8.decode("latin-1")


def _binary(text: str, random: Random) -> str:
    """Compressed data, floats or integers, read as Latin-1 or as UTF-8 with replacement characters."""
    way, size = int(random.integers(3)), len(text) + 64
    if way == 0:
        data = zlib.compress(random.bytes(size // 2) + text.encode("utf-8", "surrogatepass"))
    elif way == 1:
        data = random.standard_normal(size // 8).tobytes()
    else:
        data = b"".join(
            struct.pack("<ih", *pair) for pair in random.integers(-9999, 9999, (size // 6, 2)).tolist()
        )
    return data.decode("latin-1") if random.random() < 0.5 else data.decode("utf-8", "replace")


def _base64(text: str, random: Random) -> str:
    """Base64 of the text, of its compressed form or of random bytes, in one line or in lines of 76."""
    plain = text.encode("utf-8", "surrogatepass")
    data = (plain, zlib.compress(plain) + random.bytes(len(plain)), random.bytes(len(plain)))[
        int(random.integers(3))
    ]
    return (base64.encodebytes(data) if random.random() < 0.5 else base64.b64encode(data)).decode()


def _language(text: str, random: Random) -> str:
    language = list(LANGUAGES)[int(random.integers(len(LANGUAGES)))]
    return babble(LANGUAGES[language].strip(), len(text), random)


def babble(text: str, count: int, random: Random) -> str:
    """`count` characters with the letter statistics of `text`: each drawn from those that follow the two before it."""
    follow: dict[str, list[str]] = {}
    for a, b, c in zip(text, text[1:], text[2:]):
        follow.setdefault(a + b, []).append(c)
    said = list(text[:2])
    draws = random.random(count)
    for draw in draws[2:].tolist():
        choices = follow.get(said[-2] + said[-1]) or list(text)
        said.append(choices[int(draw * len(choices))])
    return "".join(said[:count])


BY_TOKENS: dict[str, Callable[[Ids, Tokenizer, Random], Ids]] = {
    "random": _random,
    "shuffled": _shuffled,
    "loop": _loop,
}
BY_TEXT: dict[str, Callable[[str, Random], str]] = {
    "encoding": _encoding,
    "binary": _binary,
    "base64": _base64,
    "language": _language,
}


# Opening lines of works in the public domain in other languages, to plant in English text.
LANGUAGES: dict[str, str] = {
    # Franz Kafka, Die Verwandlung, 1915
    "German": """
Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett zu einem
ungeheueren Ungeziefer verwandelt.
Er lag auf seinem panzerartig harten Rücken und sah, wenn er den Kopf ein wenig hob, seinen gewölbten,
braunen, von bogenförmigen Versteifungen geteilten Bauch, auf dessen Höhe sich die Bettdecke, zum gänzlichen
Niedergleiten bereit, kaum noch erhalten konnte.
Seine vielen, im Vergleich zu seinem sonstigen Umfang kläglich dünnen Beine flimmerten ihm hilflos vor den
Augen.
»Was ist mit mir geschehen?«, dachte er.
Es war kein Traum.
Sein Zimmer, ein richtiges, nur etwas zu kleines Menschenzimmer, lag ruhig zwischen den vier wohlbekannten
Wänden.
Über dem Tisch, auf dem eine auseinandergepackte Musterkollektion von Tuchwaren ausgebreitet war - Samsa war
Reisender -, hing das Bild, das er vor kurzem aus einer illustrierten Zeitschrift ausgeschnitten und in
einem hübschen, vergoldeten Rahmen untergebracht hatte.
Gregors Blick richtete sich dann zum Fenster, und das trübe Wetter - man hörte Regentropfen auf das
Fensterblech aufschlagen - machte ihn ganz melancholisch.
""",
    # Kalevala, collected by Elias Lönnrot, 1849
    "Finnish": """
Mieleni minun tekevi, aivoni ajattelevi lähteäni laulamahan, saa'ani sanelemahan, sukuvirttä suoltamahan,
lajivirttä laulamahan.
Sanat suussani sulavat, puhe'et putoelevat, kielelleni kerkiävät, hampahilleni hajoovat.
Veli kulta, veikkoseni, kaunis kasvinkumppalini!
Lähe nyt kanssa laulamahan, saa kera sanelemahan yhtehen yhyttyämme, kahta'alta käytyämme!
Harvoin yhtehen yhymme, saamme toinen toisihimme näillä raukoilla rajoilla, poloisilla Pohjan mailla.
Lyökämme käsi kätehen, sormet sormien lomahan, lauloaksemme hyviä, parahia pannaksemme, kuulla noien
kultaisien, tietä mielitehtoisien, nuorisossa nousevassa, kansassa kasuavassa.
Noita saamia sanoja, virsiä virittämiä vyöltä vanhan Väinämöisen, alta ahjon Ilmarisen, päästä kalvan
Kaukomielen, Joukahaisen jousen tiestä, Pohjan peltojen periltä, Kalevalan kankahilta.
""",
    # Miguel de Cervantes, Don Quijote de la Mancha, 1605
    "Spanish": """
En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía un hidalgo de los
de lanza en astillero, adarga antigua, rocín flaco y galgo corredor.
Una olla de algo más vaca que carnero, salpicón las más noches, duelos y quebrantos los sábados, lantejas
los viernes, algún palomino de añadidura los domingos, consumían las tres partes de su hacienda.
El resto della concluían sayo de velarte, calzas de velludo para las fiestas, con sus pantuflos de lo mesmo,
y los días de entresemana se honraba con su vellorí de lo más fino.
Tenía en su casa una ama que pasaba de los cuarenta, y una sobrina que no llegaba a los veinte, y un mozo de
campo y plaza, que así ensillaba el rocín como tomaba la podadera.
Frisaba la edad de nuestro hidalgo con los cincuenta años; era de complexión recia, seco de carnes, enjuto
de rostro, gran madrugador y amigo de la caza.
""",
    # Dante Alighieri, La Divina Commedia, 1321
    "Italian": """
Nel mezzo del cammin di nostra vita mi ritrovai per una selva oscura, ché la diritta via era smarrita.
Ahi quanto a dir qual era è cosa dura esta selva selvaggia e aspra e forte che nel pensier rinova la paura!
Tant' è amara che poco è più morte; ma per trattar del ben ch'i' vi trovai, dirò de l'altre cose ch'i' v'ho
scorte.
Io non so ben ridir com' i' v'intrai, tant' era pien di sonno a quel punto che la verace via abbandonai.
Ma poi ch'i' fui al piè d'un colle giunto, là dove terminava quella valle che m'avea di paura il cor
compunto, guardai in alto e vidi le sue spalle vestite già de' raggi del pianeta che mena dritto altrui per
ogne calle.
Allor fu la paura un poco queta, che nel lago del cor m'era durata la notte ch'i' passai con tanta pieta.
""",
    # Alexander Pushkin, Eugene Onegin, 1833
    "Russian": """
Мой дядя самых честных правил, когда не в шутку занемог, он уважать себя заставил и лучше выдумать не мог.
Его пример другим наука; но, боже мой, какая скука с больным сидеть и день и ночь, не отходя ни шагу прочь!
Какое низкое коварство полуживого забавлять, ему подушки поправлять, печально подносить лекарство, вздыхать
и думать про себя: когда же черт возьмет тебя!
Так думал молодой повеса, летя в пыли на почтовых, всевышней волею Зевеса наследник всех своих родных.
Друзья Людмилы и Руслана! С героем моего романа без предисловий, сей же час позвольте познакомить вас.
""",
    # Victor Hugo, Les Misérables, 1862
    "French": """
En 1815, M. Charles-François-Bienvenu Myriel était évêque de Digne.
C'était un vieillard d'environ soixante-quinze ans; il occupait le siège de Digne depuis 1806.
Quoique ce détail ne touche en aucune manière au fond même de ce que nous avons à raconter, il n'est
peut-être pas inutile, ne fût-ce que pour être exact en tout, d'indiquer ici les bruits et les propos qui
avaient couru sur son compte au moment où il était arrivé dans le diocèse.
Vrai ou faux, ce qu'on dit des hommes tient souvent autant de place dans leur vie et surtout dans leur
destinée que ce qu'ils font.
M. Myriel était fils d'un conseiller au parlement d'Aix; noblesse de robe.
On contait de lui que son père, le réservant pour hériter de sa charge, l'avait marié de fort bonne heure, à
dix-huit ou vingt ans, suivant un usage assez répandu dans les familles parlementaires.
""",
}
