// What the page takes of Tabulator: the core and the modules named here. README.md says how to build tabulator.min.js.
import Tabulator from "./package/src/js/core/Tabulator.js";
import {
  FilterModule, FormatModule, InteractionModule, ResizeColumnsModule, ResizeTableModule, SortModule,
} from "./package/src/js/core/modules/optional.js";

Tabulator.registerModule([
  FilterModule, FormatModule, InteractionModule, ResizeColumnsModule, ResizeTableModule, SortModule,
]);

export default Tabulator;
