"""Opening lines of works in the public domain in other languages, to plant in English text."""

from __future__ import annotations

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
