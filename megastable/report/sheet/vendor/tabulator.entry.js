// What the page takes of Tabulator: the core and the modules named here. README.md says how to build tabulator.min.js.
import Tabulator from "./package/src/js/core/Tabulator.js";
import {
  ExportModule, FilterModule, FormatModule, InteractionModule, PrintModule, ResizeColumnsModule, ResizeTableModule, SortModule,
} from "./package/src/js/core/modules/optional.js";

Tabulator.registerModule([
  ExportModule, FilterModule, FormatModule, InteractionModule, PrintModule, ResizeColumnsModule, ResizeTableModule, SortModule,
]);

export default Tabulator;
